"""Plans that go beyond host memory to the disk, and plans that give way to recomputation."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simdev
import torch
from offloading import session_on_sim
from test_planned import model
from torch import Tensor, nn

import offload
from offload.config import Config
from offload.planning import measure_model
from offload.probe.profile import MachineProfile, save_profile
from tests.support import assert_identical

ROWS, WIDTH, STEPS = 512, 64, 10
HOST_BYTES = 9 << 19  # for what measured steps send there, not for all that a plan would


@pytest.fixture
def remember(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """On a machine of which nothing is remembered: remember a rate of its disk."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def rate(bytes_per_s: float) -> None:
        found = MachineProfile(
            disk_write_bytes_per_s=bytes_per_s, disk_read_bytes_per_s=bytes_per_s
        )
        assert save_profile(Config(device="sim", disk_dir=tmp_path), found) is not None

    return rate


def set_link(bytes_per_s: float) -> None:
    """A device whose segments take a fraction of a millisecond, and this link."""
    simdev.configure(
        timed_queries=True, d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s,
        flops_per_s=20e9, hbm_bytes_per_s=20e9, launch_ns=500, copy_latency_ns=1000,
        min_kernel_ns=500,
    )  # fmt: skip


def data() -> Tensor:
    """Large enough that activations, not gradients, make the peak."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def train(m: nn.Module, x: Tensor, step: Any, steps: int) -> list[Tensor]:
    """Gradients of every step, on the CPU."""
    found = []
    for _ in range(steps):
        with step():
            m(x).square().mean().backward()
        found += [p.grad.cpu() for p in m.parameters() if p.grad is not None]
        m.zero_grad()
    return found


def budget_of(share: float, tmp_path: Path) -> int:
    """Of what lies between the least that any plan needs and all that is saved."""
    m, x = model().to("sim"), data().to("sim")

    def step() -> None:
        m(x).square().mean().backward()
        torch.accelerator.synchronize()

    found = measure_model(m, step, device="sim", disk_dir=tmp_path, min_offload_bytes=0)
    return int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))


class Run:
    """A planned training, and what its steps did."""

    def __init__(self, tmp_path: Path, share: float, **options: Any) -> None:
        expected = train(model(), data(), contextlib.nullcontext, STEPS)
        self.budget = budget_of(share, tmp_path)
        self.reports: list[offload.StepReport] = []
        self.peaks: list[int] = []
        self.plans: list[offload.Plan | None] = []  # that were in force
        m, x = model().to("sim"), data().to("sim")
        with (
            session_on_sim(str(tmp_path), device_budget=self.budget, **options) as self.session,
            self.session.apply(m, "auto") as self.planned,
        ):
            assert_identical(expected, train(m, x, self.step, STEPS))
        assert self.planned.plan is not None
        self.plan = self.planned.plan
        del self.session, self.planned
        assert simdev.races() == []

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        self.plans.append(self.planned.plan)
        with self.session.step() as done:
            yield
        torch.accelerator.synchronize()
        self.peaks.append(torch.accelerator.max_memory_allocated())
        self.reports.append(done.report)


def test_beyond_host_memory_the_disk_is_used_where_its_rates_are_known(
    remember: Callable[[float], None], tmp_path: Path
) -> None:
    set_link(2e9)
    remember(2e9)
    run = Run(tmp_path, 0.1, host_budget=HOST_BYTES)
    first = next(i for i, plan in enumerate(run.plans) if plan is not None)
    plan = run.plans[first]
    assert plan is not None
    assert plan.links.disk_write == plan.links.disk_read == 2e9, "later plans are by what they met"
    assert any("disk" in action for action in plan.actions.values())
    assert plan.written_bytes > 0
    # What rests goes on where host memory falls into pieces, or need not where it has died.
    assert run.reports[first].written_bytes == pytest.approx(plan.written_bytes, rel=0.25)
    assert max(r.peak_arena_bytes for r in run.reports) <= HOST_BYTES
    # Not yet within the budget itself: 2 % over it were seen where pieces come from the disk.
    assert max(run.peaks[-2:]) <= 1.05 * run.budget


def test_a_disk_of_unknown_speed_is_not_planned_with(
    remember: Callable[[float], None], tmp_path: Path
) -> None:
    set_link(2e9)
    run = Run(tmp_path, 0.1, host_budget=HOST_BYTES)
    assert run.plan.links.disk_write is None
    assert not any("disk" in action for action in run.plan.actions.values())
    assert run.reports[-1].written_bytes == 0
    assert max(run.peaks[-2:]) <= run.budget


def test_a_plan_that_turns_out_slower_gives_way_to_recomputation(
    remember: Callable[[float], None], tmp_path: Path
) -> None:
    """Measured over a fast link, run over one that has become a hundred times as slow."""
    set_link(4e9)
    budget = budget_of(0.3, tmp_path)
    m, x = model().to("sim"), data().to("sim")

    def spent() -> int:
        torch.accelerator.synchronize()
        started = simdev.host_virtual_time_ns()
        with session.step():
            m(x).square().mean().backward()
        torch.accelerator.synchronize()
        m.zero_grad()
        return simdev.host_virtual_time_ns() - started

    with (
        session_on_sim(str(tmp_path), device_budget=budget) as session,
        session.apply(m, "auto") as planned,
    ):
        before = [spent() for _ in range(9)]
        first = planned.plan
        assert first is not None
        assert any(action.startswith("host") for action in first.actions.values())
        set_link(4e7)
        after = [spent() for _ in range(8)]
        last = planned.plan
    assert last is not None
    assert last.solver == "fallback"
    assert set(last.actions.values()) <= {"recompute", "recompute+host"}
    assert "recomputing instead" in str(last)
    assert after[0] > 2 * before[-1]
    assert after[-1] < after[0] / 2
