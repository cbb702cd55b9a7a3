"""Mistakes in what a command is given are told as such, before anything is measured."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import offload
from offload.__main__ import main
from offload.optionfile import read_options

RUNS = ["profile", "tune", "plan", "sweep"]
NEEDED = {"plan": ["--device-budget", "1MiB"]}


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def told(found: Result) -> str:
    """The error, which is one line."""
    assert "Traceback" not in found.output
    assert found.exception is None or isinstance(found.exception, SystemExit)
    return found.stderr.splitlines()[-1]


NO_TARGET = "no:such"  # a mistake in an option is told before the target is looked for


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--threads", "0"], "is not in the range"),
        (["--threads", "1000000"], "is not in the range"),
        (["--seed", "-1"], "is not in the range"),
        (["--seed", str(2**70)], "is not in the range"),
        (["--disk-dir", ""], "disk_dir is empty"),
        (["--disk-dir", "/no/such"], "does not exist"),
        (["--device", ""], "torch does not know"),
        (["--engine", "uring"], "is not one of"),
        (["--host-budget", "-1"], "a size cannot be negative"),
        (["--host-budget", "nan"], "is no size"),
        (["--host-budget", "99999PB"], "no machine has more"),
        (["--disk-budget", ""], "is no size"),
        (["-o", ""], "is no NAME=VALUE"),
        (["-o", "=1"], "no option ''"),
        (["-o", "window_bytes"], "is no NAME=VALUE"),
        (["-o", "window_byte=1"], "no option 'window_byte'"),
        (["-o", "window_bytes=NaN"], "window_bytes is nan"),
        (["-o", "window_bytes=[1]"], "window_bytes is [1]"),
        (["-o", "io_threads=0"], "io_threads"),
        (["-o", "io_threads=1e400"], "io_threads"),
        (["-o", "verify=maybe"], "verify"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_of_a_session(command: str, arguments: list[str], why: str) -> None:
    found = run(command, NO_TARGET, *NEEDED.get(command, []), *arguments)
    assert found.exit_code == 2, found.output
    assert why in told(found)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["tune", "--max-overhead", "nan"], "nan is no finite number"),
        (["tune", "--max-overhead", "inf"], "is not in the range"),
        (["tune", "--max-overhead", "-0.1"], "is not in the range"),
        (["tune", "--max-overhead", ""], "is not a valid float"),
        (["tune", "--max-live-bytes", "-5"], "--max-live-bytes is '-5'; a size cannot be negative"),
        (["tune", "--max-live-bytes", ""], "is no size"),
        (["tune", "--budget-seconds", "0"], "is not in the range"),
        (["tune", "--budget-seconds", "inf"], "inf is no finite number"),
        (["tune", "--trials", "0"], "is not in the range"),
        (["tune", "--output", ""], "choose another --output"),
        (["tune", "--output", "/"], "Is a directory; choose another --output"),
        (["tune", "--output", "/no/such/dir.toml"], "No such file or directory; choose another"),
        (["plan", "--max-overhead", "nan"], "nan is no finite number"),
        (["plan", "--max-overhead", "inf"], "inf is no finite number"),
        (["plan", "--device-budget", "-1"], "a size cannot be negative"),
        (["plan", "--device-budget", "nan"], "is no size"),
        (["plan"], "give --device-budget, or --max-overhead"),
        (["plan", "--max-overhead", "1", "--save", "/no/such/plan"], "choose another --save"),
        (["plan", "--max-overhead", "1", "--save", ""], "choose another --save"),
        (["sweep", "--points", "0"], "is not in the range"),
        (["sweep", "--steps", "-1"], "is not in the range"),
        (["sweep", "--png", "/no/such/a.png"], "choose another --png"),
        (["sweep", "--html", "/"], "choose another --html"),
        (["profile", "--steps", "0"], "is not in the range"),
        (["profile", "--steps", "nan"], "is not a valid integer"),
        (["profile", "--out", ""], "choose another --out"),
        (["profile", "--out", "/dev/null/below"], "choose another --out"),
    ],
)
def test_of_one_command(arguments: list[str], why: str) -> None:
    command, *options = arguments
    found = run(command, NO_TARGET, *options)
    assert found.exit_code == 2, found.output
    assert why in told(found)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["probe", "--seconds", "nan"], "nan is no finite number"),
        (["probe", "--seconds", "1e9"], "is not in the range"),
        (["probe", ""], "disk_dir is empty"),
        (["demo", "--threads", "0"], "is not in the range"),
        (["demo", "--seed", str(2**64)], "is not in the range"),
        (["demo", "--disk-dir", ""], "disk_dir is empty"),
        (["merge-traces", "/no/such/a.json", __file__], "cannot be written"),
        (["merge-traces", "", __file__], "cannot be written"),
        (["merge-traces", "out.json", "/no/such"], "does not exist"),
        (["nothing"], "No such command 'nothing'"),
    ],
)
def test_of_others(arguments: list[str], why: str) -> None:
    found = run(*arguments)
    assert found.exit_code == 2, found.output
    assert why in told(found)


SCRIPT = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
x = torch.ones(64, 64)

def full(): model(x).sum().backward()

def no_gradients():
    def step():
        with torch.no_grad(): model(x)
    return model, step

def no_backward(): return model, lambda: model(x)
def small(): return model, lambda: model(x[:1]).sum().backward()
def needs(batch): return model, full
def step_needs(): return model, lambda batch: model(batch).sum().backward()
def number(): return 5
def generator(): yield full

def generator_step():
    def step(): yield full()
    return model, step

async def coroutine(): return full

def coroutine_step():
    async def step(): full()
    return model, step

def own_session():
    import offload
    session = offload.Session(device="cpu")
    def step():
        with session.step(): full()
    return model, step

value = 3
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("command", RUNS)
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("no_gradients", "save|could not be measured"),
        ("no_backward", "backward"),
        ("needs", "cannot be called without arguments, missing a required argument: 'batch'"),
        ("step_needs", "cannot be called without arguments, missing a required argument: 'batch'"),
        ("number", "returned an int"),
        ("generator", "returned a generator"),
        ("generator_step", "returned a generator and ran nothing"),
        ("coroutine", "returned a coroutine"),
        ("coroutine_step", "returned a coroutine and ran nothing"),
        ("own_session", "enters a session of its own"),
        ("value", "is an int, no function"),
        ("full", "returned None"),
    ],
)
def test_targets_that_are_none(command: str, function: str, why: str, script: Path) -> None:
    found = run(command, f"mine.py:{function}", *NEEDED.get(command, []))
    assert found.exit_code == 2, found.output
    error = told(found)
    assert any(part in error for part in why.split("|")), error
    assert [p.name for p in script.parent.iterdir() if p.name != "__pycache__"] == ["mine.py"]


@pytest.mark.parametrize(("command", "why"), [("profile", "lower it"), ("tune", "nothing to move")])
def test_a_step_that_saves_too_little(command: str, why: str, script: Path) -> None:
    found = run(command, "mine.py:small")
    assert found.exit_code == 2, found.output
    assert why in told(found)


def test_part_of_a_package(script: Path) -> None:
    script.write_text("from . import beside\n")
    found = run("profile", "mine.py:make")
    assert found.exit_code == 2
    assert "name it as a module of that package" in told(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[session]\nwindow_bytes = true", "window_bytes is True"),
        ('[session]\nwindow_bytes = "much"', "window_bytes is 'much'"),
        ("[session]\nwindow_bytes = nan", "window_bytes is nan"),
        ("[session]\nio_threads = [2]", "io_threads"),
        ("[session]\nio_threads = 2.5", "io_threads"),
        ('[session]\nverify = "yes"', "verify"),
        ("[session]\nengine = 3", "engine is 3"),
        ("[session]\ndisk_dir = 3", "disk_dir is 3"),
        ("[session]\nwindow_byte = 3", "did you mean 'window_bytes'"),
        ("session = 3", "has no table [session]"),
        ("[session", "is no TOML"),
        ("", "has no table [session]"),
    ],
)
def test_option_files(text: str, why: str, tmp_path: Path) -> None:
    file = tmp_path / "offload.toml"
    file.write_text(text)
    with pytest.raises((TypeError, ValueError)) as told:
        offload.Config.from_file(file)
    assert why in str(told.value)


def test_files_that_are_no_option_files(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no TOML"):
        read_options(tmp_path / "bytes", [])
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(OSError, match=str(path)):
            read_options(path, [])


MODEL = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda s: offload.plan(MODEL, None, device_budget="1GiB"), "step is None; give"),
        (lambda s: offload.plan(3, print, device_budget="1GiB"), "model is int; give"),
        (lambda s: offload.tune(3), "step is 3; give"),
        (lambda s: offload.tune(print, 3), "model is int; give"),
        (lambda s: offload.profile(3), "step is 3; give"),
        (lambda s: offload.profile(print, model=3), "model is int; give"),
        (lambda s: s.watch(3), "model is int; give"),
        (lambda s: s.apply(3, "auto", device_budget="1GiB"), "model is int; give"),
        (lambda s: s.apply(3, {"*": "disk"}), "model is int; give"),
        (lambda s: s.apply(MODEL, None), "rules are None; give"),
    ],
)
def test_what_is_no_model_and_no_step(call: Callable[[Any], object], why: str) -> None:
    with offload.Session(device="cpu") as session, pytest.raises(TypeError, match=why):
        call(session)
