"""Names of files in any coding, or in none: of scratch directories, targets and documents."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import offload
from offload.__main__ import main
from tests.support import assert_identical, drain, grads, net, rand

NAMES = [b"caf\xc3\xa9 $x_$", b"\xff\xfe", "\u65e5\u672c\u8a9e".encode()]
FEW = ["--steps", "1", "--warmup", "0", "-o", "min_offload_bytes=0", "-o", "keep_last_bytes=0"]

SCRIPT = """
import torch


def make():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    x = torch.ones(64, 64)
    return model, lambda: model(x).sum().backward()
"""


@pytest.fixture(params=NAMES, ids=["accents", "no text", "wide"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = os.path.join(os.fsencode(tmp_path), request.param)
    os.mkdir(path)
    return os.fsdecode(path)


def test_a_session_works_there(directory: str, engine: str) -> None:
    model, x = net(), rand(64, 16)
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    options = {"disk_dir": directory, "engine": engine, "device": "cpu"}
    with offload.Session(**options, min_offload_bytes=0, keep_last_bytes=0) as session:
        with session.step():
            loss = model(x).sum()
            drain(session)
            loss.backward()
        assert session.report().read_bytes
    assert_identical(expected, grads(model))
    assert os.listdir(directory) == []


def test_its_errors_name_the_directory(directory: str, engine: str) -> None:
    config = offload.Config(disk_dir=directory, engine=engine, device="cpu")
    os.rmdir(directory)
    with pytest.raises(FileNotFoundError) as told:
        offload.Session(config)
    assert directory in str(told.value) or repr(directory) in str(told.value)


def test_commands_work_there(directory: str, engine: str) -> None:
    pytest.importorskip("matplotlib")
    script, out = os.path.join(directory, "mine.py"), os.path.join(directory, "out")
    Path(script).write_text(SCRIPT)
    options = [*FEW, "--disk-dir", directory, "--engine", engine, "--out", out, "--png"]
    done = CliRunner().invoke(main, ["profile", f"{script}:make", *options])
    assert done.exit_code == 0, done.output
    assert os.fsencode(directory) in done.stdout_bytes
    page = Path(out, "profile.html").read_text("utf-8")
    assert os.fsencode(directory).decode("utf-8", "replace") in page
    done = CliRunner().invoke(main, ["plan", f"{script}no:f", "--device-budget", "1MiB"])
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize("name", NAMES[:1])
def test_in_a_locale_of_ascii(name: bytes, tmp_path: Path) -> None:
    directory = os.path.join(os.fsencode(tmp_path), name)
    os.mkdir(directory)
    script = os.path.join(directory, b"mine.py")
    Path(os.fsdecode(script)).write_text(SCRIPT)
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    where = [b"--disk-dir", directory, b"--out", os.path.join(directory, b"out")]
    done = subprocess.run(
        [sys.executable, "-m", "offload", "profile", script + b":make", *FEW, *where],
        env={**os.environ, **ascii_only, "PYTHONPATH": str(Path(offload.__file__).parents[1])},
        capture_output=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert directory in done.stdout
    assert b"waited for bytes" in done.stdout
    assert sorted({*os.listdir(directory)} - {b"__pycache__"}) == [b"mine.py", b"out"]
