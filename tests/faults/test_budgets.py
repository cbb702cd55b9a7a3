"""Budgets hold at every moment that can be looked at."""

from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.engines import Engine
from tests.doubles import LazyEngine, SlowEngine
from tests.support import chain, rand, scratch_files

NBYTES = 1 << 14


class Watch:
    """A policy that looks at memory and file each time something is saved; also in backward."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.session: offload.Session | None = None
        self.host_bytes: list[int] = []
        self.disk_bytes: list[int] = []

    def look(self, *_: Any) -> None:
        assert self.session is not None
        arena = self.session._tiers.host
        self.host_bytes.append(arena.used_bytes + arena.outside_bytes)
        # Not st_blocks: a file system counts blocks of its own there as well.
        self.disk_bytes.extend(f.st_size for f in scratch_files(self.directory))

    def __call__(self, _: offload.SavedTensor) -> offload.Placement:
        self.look()
        return offload.Placement.DISK

    def run(self, length: int) -> torch.Tensor:
        assert self.session is not None
        x = rand(NBYTES // 4).requires_grad_()
        with self.session.step():
            h = x * 1
            for _ in range(length):
                h = h.sin()
                h.register_hook(self.look)
            loss = h.sum()
            del h
            loss.backward()
        self.look()
        return x.grad


def expected(length: int) -> torch.Tensor:
    x = rand(NBYTES // 4).requires_grad_()
    chain(x * 1, length).backward()
    return x.grad


@pytest.mark.parametrize("disk", ["prompt", "slow", "lazy"])
@pytest.mark.parametrize(
    "options",
    [
        {"window_bytes": 4 * NBYTES, "prefetch_bytes": 4 * NBYTES},
        {"window_bytes": 4 * NBYTES, "host_budget": 6 * NBYTES},
        {"window_bytes": NBYTES, "prefetch_bytes": NBYTES},
        {"window_bytes": 4 * NBYTES, "host_budget": 4 * NBYTES, "prefetch_bytes": 100 * NBYTES},
    ],
)
def test_host_memory(
    open_session,
    real_engine: Engine,
    tmp_path: Path,
    options: dict[str, int],
    disk: str,
) -> None:
    watch = Watch(tmp_path)
    engine = real_engine
    if disk == "slow":  # what was written in vain still takes its time
        engine = SlowEngine(real_engine, bytes_per_s=NBYTES / 20e-3)
    elif disk == "lazy":
        engine = LazyEngine(real_engine, reads=False)
    watch.session = open_session(_engine=engine, policy=watch, **options)
    for _ in range(2):
        assert torch.equal(watch.run(20), expected(20))
    assert max(watch.host_bytes) <= watch.session.config.arena_bytes
    assert watch.session.report().peak_arena_bytes <= watch.session.config.arena_bytes


@pytest.mark.parametrize("budget", [0, 4095, NBYTES, 5 * NBYTES + 100, 1 << 20])
def test_disk(open_session, engine: str, tmp_path: Path, budget: int) -> None:
    """What does not fit stays in memory, counted; no warning, as this was asked for."""
    watch = Watch(tmp_path)
    watch.session = open_session(engine=engine, policy=watch, disk_budget=budget)
    for _ in range(3):
        assert torch.equal(watch.run(12), expected(12))
    assert max(watch.disk_bytes, default=0) <= budget
    report = watch.session.report()
    assert report.warnings == ()
    assert report.peak_disk_bytes <= budget
    kept = report.kept_bytes.get("budget", 0)
    assert report.offloaded_bytes + kept == 3 * 12 * NBYTES
    if budget >= 12 * NBYTES:
        assert kept == 0


@pytest.mark.parametrize("budget", [0, NBYTES, 2 * NBYTES - 1, 2 * NBYTES, 5 * NBYTES])
def test_device(open_session, engine: str, tmp_path: Path, budget: int) -> None:
    """Without a plan. A storage and its copy are there at one time: with less than that, no more
    than that is in use, and nothing stays.
    """
    watch = Watch(tmp_path)
    watch.session = open_session(engine=engine, policy=watch, device_budget=budget)
    assert torch.equal(watch.run(12), expected(12))
    report = watch.session.report()
    assert report.offloaded_bytes == 12 * NBYTES
    assert report.peak_live_bytes <= max(budget, 2 * NBYTES)


def test_disk_in_pieces(open_session, engine: str, tmp_path: Path) -> None:
    """Sizes that change from step to step do not make the file outgrow its budget."""
    watch = Watch(tmp_path)
    budget = 12 * NBYTES
    watch.session = open_session(engine=engine, policy=watch, disk_budget=budget)
    held: list[torch.Tensor] = []
    for i in range(20):
        x = rand(1024 * (1 + i * 7 % 5)).requires_grad_()
        with watch.session.step():
            held.append(chain(x * 1, 2))
        if i % 3:
            held.pop(i % len(held)).backward()
        watch.look()
    assert max(watch.disk_bytes) <= budget
    held.clear()
