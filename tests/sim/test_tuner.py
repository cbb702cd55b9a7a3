"""The tuner on the simulated accelerator, whose clock has no noise: what the replay predicts is
what a step takes, and the search finds what trying everything finds.
"""

import itertools
from dataclasses import replace
from pathlib import Path

import offloading  # noqa: F401 - registers the pinner of the device
import pytest
import simdev
import torch
from torch import nn

import offload
from offload.probe import MachineProfile
from offload.tuner import Choice, Setting, replayed
from offload.tuner.record import StepRecord, record_step
from offload.tuner.replay import plain_peak_bytes
from offload.tuner.stopwatch import DeviceStopwatch
from offload.tuner.trial import Runner
from offload.units import MIB
from offload.workloads import preset

IO = (2, 8 * MIB)
RATES_GB_PER_S = [0.25, 0.5, 1, 2, 5, 20]


class Rig:
    """A workload whose step takes a few milliseconds of the device's time."""

    def __init__(self, name: str, directory: Path) -> None:
        workload = preset(name)
        self.model: nn.Module = workload.build(0).to("sim")
        (batch,) = workload.batches(1, 0)
        self.batch = tuple(t.to("sim") for t in batch)
        self.config = offload.Config(device="sim", disk_dir=directory, min_offload_bytes=1)
        self.stopwatch = DeviceStopwatch(torch.device("sim", 0), simdev.host_virtual_time_ns)
        self.set_rate(1e9)

    def step(self) -> None:
        self.model.zero_grad()
        self.model(*self.batch).backward()

    def set_rate(self, out: float, into: float | None = None) -> None:
        into = into if into is not None else out
        simdev.configure(
            timed_queries=True, d2h_bytes_per_s=out, h2d_bytes_per_s=into, flops_per_s=20e9,
            hbm_bytes_per_s=20e9, launch_ns=500, copy_latency_ns=1000, min_kernel_ns=500,
        )  # fmt: skip
        self.profile = MachineProfile(
            link_out_bytes_per_s=out, link_in_bytes_per_s=into, link_latency_seconds=1e-6
        )

    def runner(self) -> Runner:
        return Runner(self.step, self.model, self.config, self.stopwatch, repeats=1)

    def record(self) -> StepRecord:
        self.step()
        return record_step(self.step, self.config, self.stopwatch)


@pytest.fixture
def gpt(tmp_path: Path) -> Rig:
    return Rig("gpt-tiny", tmp_path)


def settings_of(record: StepRecord) -> list[Setting]:
    """Small and large windows, with and without a tail, prefetch or threshold."""
    total = record.movable_bytes

    def setting(least: int, window: float, prefetch: float, kept: float) -> Setting:
        window_bytes, rest = max(4096, int(total * window)), (int(total * prefetch),)
        return Setting(least, window_bytes, *rest, int(total * kept), *IO)

    return [
        setting(1, 1 / 8, 1 / 8, 0),
        setting(1, 1 / 32, 1 / 32, 1 / 16),
        setting(40_000, 1 / 16, 1 / 4, 0),
        setting(1, 1 / 4, 1 / 16, 1 / 2),
        setting(1, 1 / 8, 0, 1 / 8),
    ]


@pytest.mark.parametrize(
    ("workload", "gb_per_s"),
    [*(("gpt-tiny", rate) for rate in RATES_GB_PER_S), ("long-tiny", 0.5), ("vision-tiny", 1)],
)
def test_predicted_time_is_what_a_step_takes(
    workload: str, gb_per_s: float, tmp_path: Path
) -> None:
    rig = Rig(workload, tmp_path)
    rig.set_rate(gb_per_s * 1e9)
    record = rig.record()
    runner = rig.runner()
    plain = runner.plain()
    assert plain.best_seconds == pytest.approx(record.end_ns / 1e9, rel=0.01)
    assert plain.peak_live_bytes == plain_peak_bytes(record)
    for setting in settings_of(record):
        predicted = replayed(record, setting, rig.profile, rig.config)
        measured = runner.offloaded(setting)
        assert predicted.seconds == pytest.approx(measured.best_seconds, rel=0.05), setting
        assert predicted.peak_live_bytes == pytest.approx(measured.peak_live_bytes, rel=0.05)
        assert measured.report is not None
        assert predicted.moved_bytes == measured.report.offloaded_bytes
        assert predicted.moved_blocks == measured.report.offloaded_blocks


def test_directions_of_different_speed(gpt: Rig) -> None:
    """What is slow on the way out is waited for in the forward, else in the backward."""
    waits = []
    for out, into in [(0.5e9, 50e9), (50e9, 0.5e9)]:
        gpt.set_rate(out, into)
        record = gpt.record()
        setting = Setting(1, 64 << 10, 64 << 10, 0, *IO)
        predicted = replayed(record, setting, gpt.profile, gpt.config)
        measured = gpt.runner().offloaded(setting)
        assert predicted.seconds == pytest.approx(measured.best_seconds, rel=0.05)
        waits.append((predicted.backpressure_seconds, predicted.stall_seconds))
    assert waits[0][0] > 10 * waits[0][1] and waits[1][1] > 10 * waits[1][0]


def test_a_profile_with_other_rates_predicts_something_else(gpt: Rig) -> None:
    """The agreement above is no accident of steps that take the same whatever is done."""
    gpt.set_rate(0.5e9)
    record = gpt.record()
    setting = Setting(1, 64 << 10, 64 << 10, 0, *IO)
    twice = replace(gpt.profile, link_out_bytes_per_s=1e9, link_in_bytes_per_s=1e9)
    seconds = [
        replayed(record, setting, profile, gpt.config).seconds for profile in (gpt.profile, twice)
    ]
    assert seconds[0] > 1.2 * seconds[1]


def test_what_is_held_by_others_moves_nothing_back(gpt: Rig) -> None:
    record = gpt.record()
    held = [b for b in record.blocks if b.held]
    assert all(b.nbytes <= max(t.nbytes for t in gpt.batch) for b in held)
    assert record.movable_bytes > MIB


def grid_of(record: StepRecord) -> list[Setting]:
    total = record.movable_bytes
    sizes = [int(total / n) for n in (32, 16, 8)]
    return [
        Setting(least, window, prefetch, kept, *IO)
        for least, window, prefetch, kept in itertools.product(
            (1,), sizes, (0, *sizes[::2]), (0, total // 8, total // 2)
        )
    ]


def test_as_good_as_trying_everything_with_a_fifth_of_the_trials(gpt: Rig) -> None:
    gpt.set_rate(1e9)
    settings = grid_of(gpt.record())
    runner = gpt.runner()
    plain = runner.plain()
    limit_bytes = int(plain.peak_live_bytes * 0.3)
    everything = {s: runner.offloaded(s) for s in settings}
    fitting = [m.ratio for m in everything.values() if m.peak_live_bytes <= limit_bytes]
    assert 0 < len(fitting) < len(settings)
    tuning = offload.tune(
        gpt.step, None, max_live_bytes=limit_bytes, config=gpt.config, settings=settings,
        profile=gpt.profile, max_trials=len(settings) // 5, repeats=1, _stopwatch=gpt.stopwatch,
    )  # fmt: skip
    assert tuning.decision.choice is Choice.OFFLOAD, tuning.decision.why
    chosen = everything[tuning.decision.trial.setting]
    assert len(tuning.trials) <= len(settings) / 5
    assert chosen.peak_live_bytes <= limit_bytes
    assert chosen.ratio <= 1.02 * min(fitting)
    assert max(fitting) > 1.05 * min(fitting), "the grid has something to choose"


def tuned(rig: Rig, **limits: object) -> offload.tuner.Tuning:
    return offload.tune(
        rig.step, rig.model, config=rig.config, profile=rig.profile, repeats=1,
        _stopwatch=rig.stopwatch, max_trials=4, **limits,
    )  # fmt: skip


def test_where_the_link_is_slow_recomputing_is_recommended(gpt: Rig) -> None:
    gpt.set_rate(0.05e9)
    peak_bytes = gpt.runner().plain().peak_live_bytes
    found = tuned(gpt, max_live_bytes=int(0.8 * peak_bytes))
    assert found.decision.choice is Choice.CHECKPOINT
    assert "recomputing takes" in found.decision.why and found.options is None


def test_where_the_link_is_fast_a_session_is(gpt: Rig) -> None:
    gpt.set_rate(20e9)
    peak_bytes = gpt.runner().plain().peak_live_bytes
    found = tuned(gpt, max_live_bytes=int(0.6 * peak_bytes))
    assert found.decision.choice is Choice.OFFLOAD
    assert found.decision.trial.measured.ratio < found.recomputed.ratio
    assert found.tuned().window_bytes == found.options["window_bytes"]


def test_a_step_on_another_device_is_told(gpt: Rig) -> None:
    def on_the_cpu() -> None:
        torch.ones(100, 100, requires_grad=True).exp().sum().backward()

    gpt.step = on_the_cpu
    with pytest.raises(ValueError, match="saved nothing on 'sim': move its model and data there"):
        tuned(gpt)


def test_host_memory_that_does_not_suffice_is_told(gpt: Rig) -> None:
    gpt.config = offload.Config(
        device="sim", disk_dir=gpt.config.disk_dir, host_budget="64KiB", window_bytes="64KiB"
    )
    settings = [Setting(1, 64 << 10, 64 << 10, 0, *IO)]
    with pytest.raises(ValueError, match=r"host memory of 64 KiB cannot hold .* raise host_budget"):
        tuned(gpt, max_overhead=0.5, settings=settings)


def test_a_limit_that_nothing_keeps_to_is_refused_with_the_least_there_is(gpt: Rig) -> None:
    found = tuned(gpt, max_live_bytes=1000)
    assert found.decision.choice is Choice.NOTHING
    assert "nothing keeps to the 1000 bytes allowed; the least alive was" in found.decision.why
