"""What trace, report and profile say of the simulated accelerator, beside its own counters."""

from pathlib import Path
from typing import Any

import pytest
import simdev
import torch
from offloading import CONFIGURATIONS, SMALL_WINDOWS, open_engine, session_on_sim
from torch import Tensor, nn

import offload
from offload.profiler import Timeline, profile
from offload.report.trace import MOMENTS, TRANSFERS, WAITS, merged
from offload.units import KIB


class Net(nn.Module):
    """Four layers that save 64 KiB each and more."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)]
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def net() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net().to("sim"), torch.randn(256, 64).to("sim")


def device_of(gb_per_s: float) -> None:
    """A device whose computation is fast, behind a link of that rate."""
    simdev.configure(
        timed_queries=True, d2h_bytes_per_s=gb_per_s * 1e9, h2d_bytes_per_s=gb_per_s * 1e9,
        flops_per_s=1e12, hbm_bytes_per_s=1e12, launch_ns=1000, copy_latency_ns=1000,
        min_kernel_ns=1000,
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_bytes_are_those_that_the_device_counted(name: str, scheduler, tmp_path: Path) -> None:
    model, x = net()
    with session_on_sim(str(tmp_path), **CONFIGURATIONS[name]) as session:
        for _ in range(2):
            torch.accelerator.synchronize()
            before = simdev.stats()
            with session.step() as step:
                model(x).backward()
            torch.accelerator.synchronize()
            session.drain()
            after, report = simdev.stats(), step.report
            out, back = report.lanes["offload"], report.lanes["reload"]
            assert out.nbytes == after.d2h.nbytes - before.d2h.nbytes > 0
            assert out.operations == after.d2h.count - before.d2h.count
            assert back.nbytes == after.h2d.nbytes - before.h2d.nbytes
            assert back.operations == after.h2d.count - before.h2d.count
            assert back.nbytes == report.reloaded_bytes
            assert report.lanes["spill"].nbytes == report.written_bytes
            assert report.lanes["fetch"].nbytes == report.read_bytes
            bound_for_disk = report.written_bytes + report.cancelled_bytes
            if name == "host":
                assert bound_for_disk == 0
            else:  # a busy machine may not have begun a write in time, or not even copied
                assert bound_for_disk + report.forwarded_bytes > 0
            assert out.peak_depth >= 1


def test_a_slow_link_stalls_and_says_whom(tmp_path: Path) -> None:
    device_of(0.05)
    model, x = net()
    with session_on_sim(str(tmp_path)) as session, session.watch(model):
        with session.step() as step:
            model(x).backward()
        torch.accelerator.synchronize()
        session.drain()
        report = step.report
        events = session.trace.events()
    stalls = [w for w in report.waits if w.kind == "stall"]
    assert {w.operator for w in stalls} <= {"TanhBackward0", "AddmmBackward0", "PowBackward0"}
    assert all(w.module.startswith("layers.") and w.tensor.startswith("float32") for w in stalls)
    assert sum(w.seconds for w in report.waits) == pytest.approx(
        report.stall_seconds + report.backpressure_seconds
    )
    assert report.stall_seconds > 0 and report.backpressure_seconds > 0
    # Independently of the counters: from the events, which are on the device's clock.
    away = merged((e.start_ns, e.end_ns) for e in events if e.name in WAITS)
    moving = merged((e.start_ns, e.end_ns) for e in events if e.name in TRANSFERS)
    instants = range(moving[0][0], moving[-1][1], 500)

    def within(spans: list[tuple[int, int]], at_ns: int) -> bool:
        return any(start <= at_ns < end for start, end in spans)

    transfer = [t for t in instants if within(moving, t)]
    hidden = sum(not within(away, t) for t in transfer) / len(transfer)
    assert report.overlap == pytest.approx(hidden, abs=0.02)
    assert report.overlap < 0.7
    rate = report.lanes["reload"].bytes_per_s
    assert rate == pytest.approx(0.05e9, rel=0.1), "the link's"


def test_a_fast_link_is_hidden(tmp_path: Path) -> None:
    device_of(100)
    model, x = net()
    windows = {"window_bytes": 512 * KIB, "prefetch_bytes": 512 * KIB}
    with session_on_sim(str(tmp_path), **windows) as session:
        for _ in range(2):
            with session.step() as step:
                model(x).backward()
        torch.accelerator.synchronize()
        session.drain()
    assert step.report.overlap is not None and step.report.overlap > 0.8


def test_moments_are_on_the_clock_of_the_device(tmp_path: Path) -> None:
    device_of(1)
    model, x = net()
    with session_on_sim(str(tmp_path)) as session:
        with session.step():
            model(x).backward()
        torch.accelerator.synchronize()
        session.drain()
        events = session.trace.events()
    moments = [e for e in events if e.name in MOMENTS]
    assert [e.name for e in moments] == ["begin", "backward", "end"]
    begin, backward, end = (e.start_ns for e in moments)
    reloads = [e for e in events if e.name == "reload"]
    assert all(backward <= e.start_ns and e.end_ns <= end for e in reloads)
    assert begin <= min(e.start_ns for e in events if e.name == "offload")
    timeline = Timeline.of(events, [], host_copies=False)
    assert {s.name for s in timeline.tracks["compute"]} >= {"forward", "backward"}
    assert [s.name for s in timeline.tracks["stall"]], "on a track of their own"


def test_peak_of_the_device_is_the_allocators(tmp_path: Path) -> None:
    model, x = net()
    with session_on_sim(str(tmp_path)) as session:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        with session.step() as step:
            model(x).backward()
        peak_bytes = torch.accelerator.max_memory_allocated()
        assert step.report.peak_device_bytes == peak_bytes
        with session.step() as step:
            pass
        assert 0 < step.report.peak_device_bytes <= peak_bytes, "no new record: what was seen"


def test_profile_of_a_device(tmp_path: Path) -> None:
    model, x = net()
    options: dict[str, Any] = {"min_offload_bytes": 0, "keep_last_bytes": 0, **SMALL_WINDOWS}
    engine = open_engine(str(tmp_path))
    found = profile(
        lambda: model(x).backward(), model=model, steps=2, warmup=1, device="sim",
        disk_dir=str(tmp_path), **options,
    )  # fmt: skip
    engine.close()
    assert found.device == "sim" and found.report.lanes["reload"].operations > 0
    assert found.plain_memory.peak_bytes > found.offloaded_memory.peak_bytes > 0
    cats = {e["cat"] for e in found.trace()["traceEvents"] if e["ph"] == "X"}
    assert {"compute", "offload", "reload", "plain steps"} <= cats
    assert "reload: host memory to device" in found.page()
    assert isinstance(found.report, offload.StepReport)
