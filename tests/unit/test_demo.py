"""The demo command: same bits pass, one wrong bit fails, mistakes get a sentence and status 2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offload.__main__ import main
from offload.cli.demo import Run, differences
from offload.errors import OffloadError
from offload.measure import Spread, session_options, worker_messages

TINY = ["demo", "--workload", "gpt-tiny", "--steps", "4", "--threads", "1", "--engine", "aio"]
MOVE_ALL = [
    *("--option", "min_offload_bytes=1KiB", "--option", "bundle_bytes=64KiB"),
    *("--option", "keep_last_bytes=0"),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_same_bits(tmp_path: Path) -> None:
    result = run(*TINY, *MOVE_ALL, "--disk-dir", str(tmp_path), "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    plain, offloaded = document["plain"], document["offloaded"]
    assert document["format"] == 1 and document["same_bits"] is True
    assert len(plain["losses"]) == len(offloaded["gradients"]) == 4
    for what in ("losses", "gradients", "parameters", "held_out_loss"):
        assert plain[what] == offloaded[what]
    assert float.fromhex(plain["losses"][-1]) < float.fromhex(plain["losses"][0])
    report = offloaded["report"]
    assert report["steps"] == 4
    assert report["offloaded_bytes"] > 2**20 and report["reloaded_bytes"] > 2**20
    # How much of it backward finds before it was written, the speed of the disk decides.
    assert report["written_bytes"] + report["cancelled_bytes"] == report["offloaded_bytes"]
    assert plain["report"] is None
    assert list(tmp_path.iterdir()) == []


def test_one_wrong_bit_is_found_and_named() -> None:
    result = run(*TINY, *MOVE_ALL, "--flip-bit-at", "4")
    assert result.exit_code == 1
    told = " ".join(result.output.split())
    assert "Not the same: the gradients of step 4" in told
    assert told.count("DIFFERENT") == 1


def test_quiet_prints_the_verdict_only() -> None:
    result = run(*TINY, "--quiet")
    assert result.exit_code == 0
    assert result.output.startswith("Bit for bit the same: 4 losses")
    assert "nothing was offloaded" in result.output  # the default threshold is above this model
    assert "step" in result.output and "┃" not in result.output


def test_the_verdict_tells_why_nothing_was_offloaded() -> None:
    told = " ".join(run(*TINY, "--quiet").output.split())
    assert "lower min_offload_bytes" in told and "disk_budget" not in told
    told = " ".join(run(*TINY, *MOVE_ALL, "--option", "disk_budget=0", "--quiet").output.split())
    assert "raise disk_budget" in told and "lower min_offload_bytes" not in told


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--steps", "2"], "not in the range x>=3"),
        (["--disk-dir", "/nonexistent"], "does not exist"),
        (["--engine", "uring"], "is not one of"),
        (["--option", "window=1"], "no option 'window'"),
        (["--option", "window_bytes=much"], "is no size"),
        (["--option", "verify"], "is no NAME=VALUE"),
    ],
)
def test_mistakes_are_usage_errors(arguments: list[str], why: str) -> None:
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_as_a_module_in_a_process() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "offload", *TINY, *MOVE_ALL], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("same bits") == 8
    assert done.stderr == ""


def test_version_and_help() -> None:
    assert run("--version").output.startswith("offload, version ")
    assert "demo" in run("--help").output


def test_a_worker_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(OffloadError, match="exit status 1: ValueError: no such thing"):
        list(worker_messages(["-c", "raise ValueError('no such thing')"]))
    with pytest.raises(OffloadError, match="signal 9"):
        list(worker_messages(["-c", "import os; os.kill(os.getpid(), 9)"]))
    with pytest.raises(OffloadError, match="'hello' where JSON was expected"):
        list(worker_messages(["-c", "print('hello')"]))


def test_a_worker_ends_when_nobody_listens() -> None:
    code = "import json, time\nwhile True: print(json.dumps({}), flush=True); time.sleep(0.01)"
    messages = worker_messages(["-c", code])
    assert next(messages) == {}
    messages.close()  # would hang in wait() if the worker went on


def test_differences_names_each() -> None:
    a = Run(losses=["1", "2"], gradients=["x", "y"], parameters="p", held_out_loss="h")
    b = Run(losses=["1", "3"], gradients=["x", "z"], parameters="q", held_out_loss="i")
    assert differences(a, a) == []
    assert differences(a, b) == [
        "the loss of step 2",
        "the gradients of step 2",
        "the final parameters",
        "the loss on held-out data",
    ]
    assert "the number of steps, 2 and 0" in differences(a, Run())[0]


def test_session_options_reads_json_values() -> None:
    texts = ["verify=true", "io_threads=3", "window_bytes=32MiB"]
    expected = {"verify": True, "io_threads": 3, "window_bytes": "32MiB", "engine": "aio"}
    assert session_options(texts, engine="aio", disk_dir=None) == expected


def test_spread() -> None:
    assert Spread.of([3.0, 1.0]) == Spread(2.0, 1.0, 3.0, 2)
