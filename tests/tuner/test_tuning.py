"""Tuning on the CPU, with real steps: what is recorded, tried, decided and written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import offload
from offload.__main__ import main
from offload.cli.targets import target_of_workload
from offload.probe import DiskRates, MachineProfile
from offload.tensors.live import LiveBytesMeter
from offload.tuner import Choice, Setting, replayed
from offload.tuner.record import record_step, with_releases
from offload.tuner.replay import plain_peak_bytes
from offload.tuner.setting import grid
from offload.tuner.stopwatch import HostStopwatch
from offload.tuner.trial import Runner, recomputing
from offload.units import KIB, MIB
from tests.support import assert_identical

RATES = MachineProfile(
    disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=1e9, copy_bytes_per_s=1e10,
    disk_rates=(DiskRates(2, 8 * MIB, 1e9, 1e9, 1e9, 1e9), DiskRates(4, MIB, 2e9, 2e9, 1e9, 1e9)),
)  # fmt: skip


@pytest.fixture
def config(tmp_path: Path, any_engine: str) -> offload.Config:
    return offload.Config(
        device="cpu", disk_dir=tmp_path, engine=any_engine, min_offload_bytes=32 * KIB
    )


def tune(config: offload.Config, **more: Any) -> offload.tuner.Tuning:
    target = target_of_workload("gpt-tiny")
    more = {"max_trials": 2, "repeats": 1, "profile": RATES, **more}
    return offload.tune(target.step, target.model, config=config, **more)


# -- the record ------------------------------------------------------------------------------------


def test_a_record_has_what_is_saved_and_asked_for(config: offload.Config) -> None:
    x, held = torch.randn(64, 64, requires_grad=True), torch.ones(64, 64)

    def step() -> None:
        y = x.exp()  # saves its result, as does ...
        (y.sin() * held).sum().backward()  # ... sin its input; the product saves both factors

    record = record_step(step, config, HostStopwatch())
    nbytes = 4 * 64 * 64
    assert [b.nbytes for b in record.blocks] == [nbytes] * len(record.blocks)
    assert [b.held for b in record.blocks] == [False, True]
    saves = [t.block for t in record.touches if not t.is_use]
    assert saves == [0, 0, 1]
    uses = [t for t in record.touches if t.is_use]
    assert sorted(t.save for t in uses) == [0, 1, 2]
    assert record.movable_bytes == nbytes
    times = [t.at_ns for t in record.touches]
    assert times == sorted(times) and times[0] >= 0 and times[-1] <= record.end_ns


def test_the_replay_of_a_record_holds_what_a_meter_sees(config: offload.Config) -> None:
    target = target_of_workload("gpt-tiny")
    record = record_step(target.step, config, HostStopwatch())
    with LiveBytesMeter(exclude=[*target.model.parameters(), *target.model.buffers()]) as meter:
        target.step()
    assert plain_peak_bytes(record) == meter.peak_bytes


@pytest.mark.parametrize(
    "given",
    [
        Setting(32 * KIB, 128 * KIB, 128 * KIB, 0, 1, 8 * MIB),
        Setting(32 * KIB, 64 * KIB, 256 * KIB, 256 * KIB, 1, 8 * MIB),
        Setting(100 * KIB, 256 * KIB, 128 * KIB, 128 * KIB, 1, 8 * MIB),
    ],
)
def test_bytes_alive_are_predicted(given: Setting, config: offload.Config) -> None:
    target = target_of_workload("gpt-tiny")
    runner = Runner(target.step, target.model, config, HostStopwatch(), repeats=1)
    runner.plain()
    predicted = replayed(runner.record(), given, RATES, config)
    measured = runner.offloaded(given)
    assert measured.report is not None
    assert predicted.moved_bytes == measured.report.offloaded_bytes
    # What the disk did by when differs from step to step, within the windows.
    slack = given.window_bytes + given.prefetch_bytes
    assert abs(predicted.peak_live_bytes - measured.peak_live_bytes) <= slack


def test_releases_are_those_of_the_frames(config: offload.Config) -> None:
    def step() -> None:
        x = torch.randn(64, 64, requires_grad=True)
        y = x.exp()
        z = y.exp()
        del y
        w = z.exp()
        w.exp().sum().backward()

    record = with_releases(record_step(step, config, HostStopwatch()), step, config)
    assert [b.nbytes for b in record.blocks] == [4 * 64 * 64] * 4
    # y is let go of before the third save; z and w live on in the frame until the end.
    assert record.released[0] == 2
    assert record.released[1] >= 4 and record.released[2] >= 4
    other = record_step(lambda: step() or torch.ones(8, 8), config, HostStopwatch())
    assert with_releases(other, lambda: None, config).released == ()


# -- settings --------------------------------------------------------------------------------------


def test_the_grid_is_in_proportion_and_has_the_own_setting(config: offload.Config) -> None:
    target = target_of_workload("gpt-tiny")
    record = record_step(target.step, config, HostStopwatch())
    settings = grid(record, config, RATES)
    assert Setting.of(config) in settings
    assert len(settings) == len(set(settings)) > 50
    for s in settings:
        offload.Config(**{"device": "cpu", **s.options()})  # all of them can work
    others = [s for s in settings if s != Setting.of(config)]
    assert max(s.window_bytes for s in others) <= record.movable_bytes / 4
    assert {(s.io_threads, s.io_block_bytes) for s in settings} == {(2, 8 * MIB), (4, MIB)}
    assert len({s.min_offload_bytes for s in settings}) > 1
    # A long step takes longer to replay.
    long = replace(record, touches=record.touches * 50)
    assert 1 < len(grid(long, config, RATES)) * len(long.touches) <= 1_100_000
    assert grid(long, config, RATES)[0] == Setting.of(config)


# -- recomputation ---------------------------------------------------------------------------------


def test_recomputing_changes_no_bit_and_nothing_stays_changed() -> None:
    target = target_of_workload("gpt-tiny")

    def gradients() -> list[torch.Tensor]:
        target.step()
        return [p.grad.clone() for p in target.model.parameters()]

    plain = gradients()
    blocks = list(target.model.blocks)
    own = blocks[0].forward
    blocks[0].forward = own  # as somebody's patch of an instance
    meter = LiveBytesMeter(exclude=target.model.parameters())
    with recomputing(blocks, meter), meter:
        assert_identical(plain, gradients())
    assert "forward" not in vars(blocks[1]) and vars(blocks[0])["forward"] == own
    del blocks[0].forward
    with LiveBytesMeter(exclude=target.model.parameters()) as everything:
        assert_identical(plain, gradients())
    assert meter.peak_bytes < 0.7 * everything.peak_bytes


# -- tuning ----------------------------------------------------------------------------------------


def test_what_fits_is_left_alone_and_costs_no_trial(config: offload.Config) -> None:
    found = tune(config, max_live_bytes="1GiB")
    assert found.decision.choice is Choice.PLAIN
    assert found.trials == () and found.options is None
    with pytest.raises(ValueError, match="no setting is recommended: plain training holds"):
        found.tuned()


def test_a_choice_keeps_to_the_limit_and_comes_back_from_its_file(
    config: offload.Config, tmp_path: Path
) -> None:
    """Without a model there is nothing to recompute, and any time is allowed."""
    target = target_of_workload("gpt-tiny")
    found = offload.tune(
        target.step, config=config, max_live_bytes=MIB, profile=RATES, repeats=1, max_trials=6
    )
    assert found.decision.choice is Choice.OFFLOAD, found.decision.why
    chosen = found.decision.trial
    assert chosen is not None and chosen.measured.peak_live_bytes <= MIB
    found.save(tmp_path / "offload.toml", title="A test")
    again = offload.Config.from_file(tmp_path / "offload.toml", device="cpu", disk_dir=tmp_path)
    assert again == found.tuned()
    assert json.loads(json.dumps(found.to_dict()))["choice"] == "offload"
    assert [p.name for p in tmp_path.iterdir()] == ["offload.toml"]


def test_recomputation_and_trials_are_measured_beside_plain_steps(config: offload.Config) -> None:
    found = tune(config, max_live_bytes="64KiB", repeats=2)
    assert found.decision.choice is Choice.NOTHING
    assert found.recomputed is not None
    for measured in (found.recomputed, *(t.measured for t in found.trials)):
        assert len(measured.seconds) == len(measured.plain_seconds) == 2
        assert 0 < measured.peak_live_bytes < found.plain.peak_live_bytes
    assert all(t.measured.report.offloaded_bytes == t.moved_bytes for t in found.trials)
    assert 0 < len(found.curve) <= 8 and found.settings > 50


def no_gradients() -> None:
    with torch.no_grad():
        torch.ones(100, 100).exp()


def no_backward() -> None:
    torch.ones(100, 100, requires_grad=True).exp()


def small() -> None:
    torch.ones(10, 10, requires_grad=True).exp().sum().backward()


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (no_gradients, "saved nothing for a backward"),
        (no_backward, r"does it call backward\(\)"),
        (small, "nothing to move: its largest storage that could leave has 400 bytes"),
    ],
)
def test_steps_that_cannot_be_tuned(step: Any, why: str, config: offload.Config) -> None:
    with pytest.raises(ValueError, match=why):
        offload.tune(step, config=config, profile=RATES)


@pytest.mark.parametrize(
    ("given", "error", "why"),
    [
        ({"max_live_bytes": "much"}, ValueError, "max_live_bytes is 'much', which is no size"),
        ({"max_overhead": -0.1}, ValueError, "give a share like 0.05"),
        ({"max_overhead": "5%"}, TypeError, "give a share like 0.05"),
        ({"window_bytes": 1}, TypeError, "either a Config or options"),
    ],
)
def test_bad_limits(given: dict[str, Any], error: Any, why: str, config: offload.Config) -> None:
    with pytest.raises(error, match=why):
        tune(config, **given)


def test_a_host_budget_is_kept(config: offload.Config, tmp_path: Path) -> None:
    tight = offload.Config(
        device="cpu", disk_dir=tmp_path, engine=config.engine, host_budget="512KiB",
        window_bytes="256KiB", min_offload_bytes="32KiB",
    )  # fmt: skip
    found = tune(tight, max_overhead=10.0)
    assert found.trials
    for trial in found.trials:
        assert trial.measured.report.peak_arena_bytes <= 512 * KIB
        assert trial.setting.window_bytes <= 512 * KIB


def test_a_disk_without_rates_is_told(config: offload.Config) -> None:
    with pytest.raises(ValueError, match="could not be measured; see what 'offload probe' says"):
        tune(config, profile=MachineProfile())


# -- the command -----------------------------------------------------------------------------------


def run(*arguments: str) -> Result:
    options = ["--device", "cpu", "--repeats", "1", "--trials", "2"]
    return CliRunner().invoke(main, ["tune", *options, *arguments])


SCRIPT = """
import torch

def offloads():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(16)))
    x = torch.randn(256, 256)
    return lambda: model(x).square().sum().backward()

def raises():
    def step():
        raise KeyError("boom")
    return step

def broken():
    raise RuntimeError("no data")

def nothing():
    return lambda: None
"""


@pytest.fixture
def script(elsewhere: Path) -> str:
    (elsewhere / "train.py").write_text(SCRIPT)
    return str(elsewhere / "train.py")


def test_the_command_writes_what_a_session_reads(script: str, elsewhere: Path) -> None:
    limits = ["--max-live-bytes", "3MiB", "--option", "min_offload_bytes=64KiB", "--trials", "6"]
    result = run(f"{script}:offloads", *limits, "--json", "--output", "my.toml")
    document = json.loads(result.output)
    assert result.exit_code == 0, document["why"]
    assert document["format"] == 1 and document["file"] == "my.toml"
    assert document["options"]["io_threads"] in (2, 4)
    best = min(document["trials"], key=lambda t: (t["peak_live_bytes"] > 3 * MIB, t["ratio"]))
    assert best["peak_live_bytes"] <= 3 * MIB
    config = offload.Config.from_file(elsewhere / "my.toml", device="cpu")
    assert config.window_bytes == document["options"]["window_bytes"]


def test_tables_and_refusal(script: str, elsewhere: Path) -> None:
    result = run(f"{script}:offloads", "--max-live-bytes", "1KiB")
    assert result.exit_code == 1
    assert "nothing keeps to the 1 KiB allowed" in result.output
    assert "Tried" in result.output and "as predicted of" in result.output
    assert not (elsewhere / "offload.toml").exists()


def test_quiet_prints_the_verdict_only(script: str) -> None:
    result = run(f"{script}:offloads", "--max-live-bytes", "1GiB", "--quiet")
    assert result.exit_code == 1
    assert result.output.startswith("Train plain: plain training holds")
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("target", "status", "why"),
    [
        ("gpt-tinny", 2, "did you mean 'gpt-tiny'?"),
        ("train.py:nosuch", 2, "has no function 'nosuch'"),
        ("train.py:raises", 3, "a step of 'train.py:raises' failed: KeyError: 'boom' ("),
        (
            "train.py:broken",
            3,
            "the target 'train.py:broken' could not be loaded: RuntimeError: no",
        ),
        ("train.py:nothing", 2, "saved nothing for a backward"),
    ],
)
def test_targets_that_fail(target: str, status: int, why: str, script: str) -> None:
    result = run(target)
    assert result.exit_code == status
    assert why in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--max-live-bytes", "much"], "is no size"),
        (["--max-overhead", "-1"], "not in the range"),
        (["--option", "window=1"], "no option 'window'"),
        (["--device", "warp"], "torch does not know"),
        (["--trials", "0"], "not in the range"),
    ],
)
def test_mistakes_are_usage_errors(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(main, ["tune", "gpt-tiny", *arguments])
    assert result.exit_code == 2
    assert why in " ".join(result.output.split())
