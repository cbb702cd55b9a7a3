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
    assert [p["name"] for p in points] == ["plain", "recompute all", "offload all", "plan", "plan"]
    plans = points[3:]
    assert all(p["measured_bytes"] <= p["budget_bytes"] for p in plans)
    assert plans[0]["budget_bytes"] < plans[1]["budget_bytes"]
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
        (["gpt-tiny", "--device-budget", "1MiB", "--segment", "heads"], 1, "no module 'heads'"),
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
