"""Measures what the hooks cost the thread that trains, per saved tensor.

The graph is a chain of sines of one size: each saves its input, and next to nothing else happens.
It runs forward and backward under hooks that do nothing and in a step of a session, in turn, round
after round; the difference per tensor is what pack and unpack cost together. "CPU" is the time of
the calling thread. "wall" counts its waiting as well: a chain asks for more transfers than a disk
completes meanwhile, so that tells more about the disk than about the hooks.

What its bytes alone cost an offloaded tensor is measured as a memmove between buffers that are not
in the cache, and taken off before a figure is compared with its target.

    python scripts/bench_hooks.py --rounds 9 --disk-dir /nvme/scratch
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import offload
from offload.measure import Spread

JSON_FORMAT = 1
M_TRIM_THRESHOLD = -1  # malloc.h
PAUSE_SECONDS = 0.05  # the workers finish what a chain has left in flight


class Cost(NamedTuple):
    """Of one saved tensor."""

    cpu_us: float
    wall_us: float


@dataclass(frozen=True)
class Case:
    """Saved tensors of one size, and what is done with them."""

    name: str
    nbytes: int
    target_us: float | None  # most CPU time over hooks that do nothing, and over the bytes
    options: dict[str, Any]  # of the session; none: they stay, being small


BUNDLED = {"min_offload_bytes": 4096, "keep_last_bytes": 0}
SINGLY = {**BUNDLED, "bundle_bytes": 0}
CASES = [
    Case("kept, 4 KiB", 4 << 10, 3.0, {}),
    Case("offloaded, 16 KiB", 16 << 10, 25.0, BUNDLED),
    Case("offloaded, 64 KiB", 64 << 10, 25.0, BUNDLED),
    Case("by itself, 16 KiB", 16 << 10, None, SINGLY),
    Case("by itself, 64 KiB", 64 << 10, None, SINGLY),
]


@dataclass(frozen=True)
class Row:
    """A case over all rounds, per tensor."""

    case: str
    noop_cpu_us: Spread
    cpu_us: Spread  # over noop
    wall_us: Spread  # over noop
    bytes_cpu_us: Spread
    judged_us: float  # median CPU over noop, besides the bytes
    target_us: float | None
    holds: bool


def timed(work: Callable[[], object], tensors: int) -> Cost:
    """The cost of ``work``, which handles so many tensors, with the collector off."""
    gc.collect()
    gc.disable()
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    work()
    cpu, wall = time.thread_time_ns() - cpu, time.perf_counter_ns() - wall
    gc.enable()
    time.sleep(PAUSE_SECONDS)
    return Cost(cpu / tensors / 1e3, wall / tensors / 1e3)


def run_chain(context: AbstractContextManager[object], nbytes: int, tensors: int) -> None:
    """Save ``tensors`` tensors of ``nbytes``, and ask for them in reverse."""
    x = y = torch.ones(nbytes // 4, requires_grad=True)
    with context:
        for _ in range(tensors):
            y = y.sin()
        y.backward(torch.ones_like(x))


def move_bytes(src: torch.Tensor, dst: torch.Tensor) -> None:
    """Copy every row."""
    to, at, nbytes = dst.data_ptr(), src.data_ptr(), src.shape[1]
    for begin in range(0, src.numel(), nbytes):
        ctypes.memmove(to + begin, at + begin, nbytes)


@contextlib.contextmanager
def contenders(
    case: Case, tensors: int, directory: str | None
) -> Iterator[dict[str, Callable[[], Any]]]:
    """What is measured for ``case``, by name."""
    options: dict[str, Any] = {"engine": "native", "disk_dir": directory, **case.options}
    noop = partial(saved_tensors_hooks, lambda tensor: tensor, lambda packed: packed)
    with offload.Session(**options) as session:
        found: dict[str, Callable[[], Any]] = {
            "noop": lambda: run_chain(noop(), case.nbytes, tensors),
            "ours": lambda: run_chain(session.step(), case.nbytes, tensors),
        }
        if case.options:
            src, dst = torch.ones(2, tensors, case.nbytes, dtype=torch.uint8)
            found["bytes"] = partial(move_bytes, src, dst)
        yield found
        moved_bytes = session.report().to_dict()["offloaded_bytes"]
    if (moved_bytes > 0) != bool(case.options):
        raise click.ClickException(f"{case.name}: {moved_bytes} bytes were offloaded")


def measure(case: Case, rounds: int, tensors: int, directory: str | None) -> Row:
    """All rounds of ``case``, after one to warm up."""
    taken: dict[str, list[Cost]] = {}
    with contenders(case, tensors, directory) as found:
        for number in range(rounds + 1):
            for name, work in found.items():
                cost = timed(work, tensors)
                if number:
                    taken.setdefault(name, []).append(cost)
    pairs = list(zip(taken["ours"], taken["noop"], strict=True))
    cpu, wall = (Spread.of([a[i] - b[i] for a, b in pairs]) for i in range(2))
    noop = Spread.of([b.cpu_us for _, b in pairs])
    moved = Spread.of([c.cpu_us for c in taken.get("bytes", [Cost(0.0, 0.0)])])
    judged, limit = cpu.median - moved.median, case.target_us
    return Row(case.name, noop, cpu, wall, moved, judged, limit, limit is None or judged <= limit)


def show(console: Console, rows: list[Row]) -> None:
    def told(spread: Spread) -> str:
        return f"{spread.median:.1f} \\[{spread.low:.1f}-{spread.high:.1f}]"

    table = Table(title="us per saved tensor, median and range over the rounds")
    table.add_column("tensors")
    for column in ("no-op hooks, CPU", "ours over it, CPU", "wall", "bytes, CPU"):
        table.add_column(column, justify="right")
    for row in rows:
        spreads = (row.noop_cpu_us, row.cpu_us, row.wall_us, row.bytes_cpu_us)
        table.add_row(row.case, *(told(spread) for spread in spreads))
    console.print(table)
    for row in rows:
        told_us = f"{row.case}: {row.judged_us:.1f} us of CPU time besides the bytes"
        if row.target_us is None:
            console.print(f"      {told_us}")
        else:
            mark = "[green]pass[/]" if row.holds else "[red]FAIL[/]"
            console.print(f"{mark}  {told_us}, target {row.target_us:.0f}")


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--tensors", type=click.IntRange(min=1), default=2000, show_default=True)
@click.option("--disk-dir", type=click.Path(exists=True, file_okay=False), envvar="OFFLOAD_DIR")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def main(rounds: int, tensors: int, disk_dir: str | None, as_json: bool) -> None:
    """Measure what the hooks cost the thread that trains, per saved tensor."""
    torch.set_num_threads(1)
    # Or memory would go back to the system and be faulted in anew by one contender, not the other.
    getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(M_TRIM_THRESHOLD, 1 << 30)
    rows = [measure(case, rounds, tensors, disk_dir) for case in CASES]
    if as_json:
        document = {
            "format": JSON_FORMAT,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "torch": torch.__version__,
            "rounds": rounds,
            "tensors": tensors,
            "rows": [asdict(row) for row in rows],
        }
        click.echo(json.dumps(document, indent=2))
    else:
        show(Console(highlight=False), rows)
    sys.exit(0 if all(row.holds for row in rows) else 1)


if __name__ == "__main__":
    main()
