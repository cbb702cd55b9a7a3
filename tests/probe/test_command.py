"""The command: what it prints, its exit status, and mistakes."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offload.__main__ import main
from offload.probe.disk import Cell, fio_rates, measure_disk
from offload.system.machine import filesystem_of
from offload.units import MIB


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["probe", "--device", "cpu", "--seconds", "0.005", *arguments])


def test_json(tmp_path: Path, cache: Path) -> None:
    result = run(str(tmp_path), "--quick", "--no-fio", "--json")
    document = json.loads(result.output)
    assert document["format"] == 1
    assert document["directory"]["directory"] == str(tmp_path.resolve())
    assert all(rate > 0 for row in document["disk"] for rate in row.values())
    first = document["disk"][0]
    assert (first["io_threads"], first["io_block_bytes"]) == (2, 8 * MIB)
    assert document["profile"]["disk_write_bytes_per_s"] == first["write_bytes_per_s"]
    assert {"level", "text", "fix"} == set(document["findings"][0])
    bad = any(f["level"] == "bad" for f in document["findings"])
    assert result.exit_code == (1 if bad else 0)
    assert list(tmp_path.iterdir()) == []
    (kept,) = (cache / "offload").iterdir()
    assert json.loads(kept.read_text())["profile"] == document["profile"]


def test_quiet_prints_verdicts_only(tmp_path: Path) -> None:
    output = run(str(tmp_path), "--quick", "--no-fio", "--quiet", "--engine", "aio").output
    assert "warning" in output and "'aio' engine is used" in output
    assert "┃" not in output and "Machine" not in output


def test_a_directory_in_memory_fails() -> None:
    if not os.path.isdir("/dev/shm") or not filesystem_of("/dev/shm").in_memory:
        pytest.skip("no tmpfs here")
    result = run("/dev/shm", "--quick", "--no-fio", "--quiet")
    assert result.exit_code == 1
    assert "offloading there frees nothing" in result.output


def test_without_fio_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run(str(tmp_path), "--quick")
    assert result.exit_code in (0, 1), result.output
    assert "fio is not installed" in result.output
    assert "┃" in result.output and "Machine" in result.output


FIO = """#!/bin/sh
[ "$1" = --version ] && { echo fio-9.9; exit; }
case "$*" in *rw=write*) key=write;; *) key=read;; esac
echo "fio: a warning"
echo '{"jobs": [{"'$key'": {"io_bytes": 3000000, "runtime": 2}}]}'
"""


def test_what_fio_says_is_read(tmp_path: Path) -> None:
    program = tmp_path / "fio"
    program.write_text(FIO)
    program.chmod(0o755)
    sizes = {"block_bytes": MIB, "file_bytes": 4 * MIB, "seconds": 0.01}
    found = fio_rates(str(tmp_path), **sizes, program=str(program))
    assert found is not None and found.version == "fio-9.9"
    assert found.write_bytes_per_s == found.read_bytes_per_s == 1.5e9
    for broken in ("#!/bin/sh\nexit 1\n", "#!/bin/sh\necho nothing\n"):
        program.write_text(broken)
        assert fio_rates(str(tmp_path), **sizes, program=str(program)) is None
    assert fio_rates(str(tmp_path), **sizes, program="no-such-program") is None
    assert [p.name for p in tmp_path.iterdir()] == ["fio"]


@pytest.mark.parametrize("engine", ["native", "aio"])
def test_every_engine_is_measured(engine: str, tmp_path: Path) -> None:
    if engine == "native":
        pytest.importorskip("offload._native")
    seen: list[str] = []
    (rates,) = measure_disk(
        str(tmp_path), [Cell(1, MIB)], file_bytes=16 * MIB, seconds=0.001, engine=engine,
        advance=seen.append,
    )  # fmt: skip
    assert rates.io_threads == 1 and rates.duplex_write_bytes_per_s == rates.duplex_read_bytes_per_s
    assert seen == ["disk, 1 threads, 1 MiB"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["/nonexistent"], "does not exist"),
        (["--device", "warp"], "torch does not know"),
        (["--engine", "uring"], "is not one of"),
        (["--seconds", "0"], "not in the range"),
        (["/proc/version"], "is not a directory"),
    ],
)
def test_mistakes_are_usage_errors(arguments: list[str], why: str) -> None:
    result = run("--quick", *arguments)
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())
    assert "Traceback" not in result.output
