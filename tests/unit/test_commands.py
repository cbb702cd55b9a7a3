"""What all commands do alike with targets that misbehave and with an interrupt."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from offload.__main__ import main

SCRIPT = """
import sys, torch

def value_error(): raise ValueError("its own")
def leaves(): sys.exit(0)
def leaves_in_step(): return lambda: sys.exit(0)

def ok():
    print("noise while made")
    model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh(), torch.nn.Linear(512, 8))
    x = torch.randn(512, 64)

    def step():
        print("noise of a step")
        model(x).sum().backward()
    return model, step

def interrupted():
    def step(): raise KeyboardInterrupt
    return step
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "[" / "b]odd.py"  # rich would read its path as markup, and ":ok:" as emoji
    path.parent.mkdir()
    path.write_text(SCRIPT)
    return path


def run(command: str, target: str, tmp_path: Path, *more: str) -> Result:
    where = {"profile": "--out", "tune": "--output"}[command]
    return CliRunner().invoke(main, [command, target, where, str(tmp_path / "out"), *more])


@pytest.mark.parametrize("command", ["profile", "tune"])
@pytest.mark.parametrize("function", ["value_error", "leaves", "leaves_in_step"])
def test_errors_of_a_target_are_no_wrong_usage(
    script: Path, tmp_path: Path, command: str, function: str
) -> None:
    found = run(command, f"{script}:{function}", tmp_path)
    assert found.exit_code == 3, found.output
    assert "odd.py" in found.output
    assert "Usage" not in found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("function", ["value_error", "leaves"])
def test_a_target_that_cannot_be_loaded_has_no_plan(script: Path, function: str) -> None:
    found = CliRunner().invoke(main, ["plan", f"{script}:{function}", "--device-budget", "9MiB"])
    assert found.exit_code == 3, found.output
    assert "Usage" not in found.output


@pytest.mark.parametrize("command", ["profile", "tune"])
def test_an_interrupt_is_no_verdict(script: Path, tmp_path: Path, command: str) -> None:
    found = run(command, f"{script}:interrupted", tmp_path)
    assert found.exit_code == 130, found.output


def test_json_is_pure_and_names_are_no_markup(script: Path, tmp_path: Path) -> None:
    few = ("--steps", "1", "--warmup", "0")
    small = ("--option", "min_offload_bytes=64KiB", "--option", "keep_last_bytes=0")
    found = run("profile", f"{script}:ok", tmp_path, *few, *small, "--json")
    assert json.loads(found.stdout)["name"] == f"{script}:ok"
    assert "noise while made" in found.stderr
    assert "noise of a step" in found.stderr
    shown = run("profile", f"{script}:ok", tmp_path, *few, *small)
    assert shown.exit_code == 0, shown.exception
    assert "[/b]odd.py:ok" in "".join(shown.output.split())  # it is wrapped


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_tuning_looks_first_whether_it_can_write(script: Path, tmp_path: Path, parent: str) -> None:
    (tmp_path / "file").touch()
    found = CliRunner().invoke(
        main, ["tune", f"{script}:value_error", "--output", str(tmp_path / parent / "o.toml")]
    )
    assert found.exit_code == 2
    assert parent in found.output
