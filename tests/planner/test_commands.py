"""The commands plan and sweep, as a user calls them."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import offload
from offload.__main__ import main

TINY = ["-o", "min_offload_bytes=0", "--device", "cpu", "--threads", "1", "--quiet"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


def test_plan_as_a_table_as_json_and_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = run("plan", "gpt-tiny", "--device-budget", "900KiB", "--save", str(file), *TINY)
    assert done.exit_code == 0, done.output
    assert "blocks.2" in done.output
    plan = offload.Plan.from_json(file.read_text())
    assert plan.peak_bytes <= 900 << 10
    done = run("plan", "gpt-tiny", "--max-overhead", "9", "--json", *TINY)
    document = json.loads(done.stdout)
    assert document["format"] == 1
    assert document["target"] == "gpt-tiny"
    assert len(document["plan"]["rows"]) >= 3


def test_sweep_draws_a_curve(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, page = tmp_path / "curve.png", tmp_path / "curve.html"
    paths = ("--png", str(png), "--html", str(page))
    done = run("sweep", "gpt-tiny", "--points", "2", "--steps", "1", "--json", *paths, *TINY)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    points = document["points"]
    assert [p["name"] for p in points[:3]] == ["plain", "recompute all", "offload all"]
    others = {p["name"]: p for p in points[:3]}
    plans = points[3:]
    assert {p["name"] for p in plans} == {"plan"}
    assert all(p["measured_bytes"] <= p["budget_bytes"] for p in plans)
    *beside, first, last = plans
    assert first["budget_bytes"] < last["budget_bytes"]
    assert all(p["budget_bytes"] == others[p["beside"]]["measured_bytes"] for p in beside)
    assert "recompute all" in {p["beside"] for p in beside}
    assert png.read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    assert "data:image/svg+xml;base64," in text
    assert "http" not in text.replace("http-equiv", "")


def test_predictions_alone() -> None:
    done = run("sweep", "gpt-tiny", "--points", "1", "--steps", "0", *TINY)
    assert done.exit_code == 0, done.output
    assert "recompute all" in done.output


def test_what_is_too_small_to_leave_is_measured_too() -> None:
    done = run("sweep", "gpt-tiny", "--points", "1", "--steps", "1", "--json")
    assert done.exit_code == 0, done.output
    plain, again, *_ = json.loads(done.stdout)["points"]
    assert plain["measured_bytes"] == pytest.approx(plain["predicted_bytes"], rel=0.05)
    assert again["measured_bytes"] == pytest.approx(again["predicted_bytes"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["gpt-tiny"], 2, "give --device-budget, or --max-overhead"),
        (["gpt-tinny", "--device-budget", "1MiB"], 2, "did you mean 'gpt-tiny'"),
        (["gpt-tiny", "--device-budget", "huge"], 2, "is no size"),
        (["gpt-tiny", "--device-budget", "10KiB"], 1, "needs"),
        (["gpt-tiny", "--device-budget", "1MiB", "--segment", "heads"], 2, "no module 'heads'"),
        (["gpt-tiny", "--device-budget", "1MiB", "-o", "windows=3"], 2, "no option 'windows'"),
    ],
)
def test_mistakes_are_told(arguments: list[str], status: int, message: str) -> None:
    done = run("plan", *arguments, *TINY)
    assert done.exit_code == status, done.output
    assert message in done.output
    assert "Traceback" not in done.output


def test_a_step_without_its_model_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "step.py"
    script.write_text("def make():\n    return lambda: None\n")
    done = run("plan", f"{script}:make", "--device-budget", "1MiB", *TINY)
    assert done.exit_code == 2
    assert "return a pair" in done.output


TALKS = """
import torch

def make():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
    print("made it")

    def step():
        print("a step")
        model(torch.ones(64, 64)).sum().backward()

    return model, step

def broken():
    model, step = make()

    def fails():
        step()
        raise KeyError("boom")

    return model, fails
"""


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_what_a_target_prints_is_in_no_document(tmp_path: Path, command: str) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    options = ["--max-overhead", "9"] if command == "plan" else ["--points", "1", "--steps", "0"]
    done = run(command, f"{tmp_path / 'talks.py'}:make", *options, "--json", *TINY)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["format"] == 1
    assert "made it" in done.stderr and "a step" in done.stderr


@pytest.mark.parametrize("command", ["plan", "sweep"])
def test_a_step_that_raises_is_told_with_its_place(tmp_path: Path, command: str) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    options = ["--max-overhead", "9"] if command == "plan" else ["--points", "1"]
    done = run(command, f"{tmp_path / 'talks.py'}:broken", *options, *TINY)
    assert done.exit_code == 3, done.output
    assert "failed: KeyError: 'boom' (" in done.output and "talks.py:" in done.output


def test_a_plan_that_cannot_be_saved_is_not_made(tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text(TALKS)
    target, save = f"{tmp_path / 'talks.py'}:make", str(tmp_path / "no" / "such" / "plan.json")
    done = run("plan", target, "--max-overhead", "9", "--save", save, *TINY)
    assert done.exit_code == 2, done.output
    assert "choose another --save" in done.output and "a step" not in done.output
