"""Measure memory copies: the engine's against memmove, torch and numpy.

The rows of one size are measured in turn, round after round, so that a busy moment of the machine
hits all alike; the table shows the median and the range. The ratio is to the best copy of that size
that is not the engine's. Buffers rotate through 512 MiB, so that small copies do not find theirs in
the cache.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy
import torch
from listed import numbers
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import _native
from offload.units import MIB

FORMAT_VERSION = 1
FOOTPRINT_BYTES = 512 * MIB
TARGET_RATIO = 0.95
TARGET_SIZE_MIB = 64


@dataclass(frozen=True)
class Pair:
    """A source and a destination, in each form that some contender wants."""

    src: torch.Tensor
    dst: torch.Tensor
    slot: _native.Slot

    @classmethod
    def allocate(cls, arena: _native.Arena, size_bytes: int) -> Pair:
        """Return resident buffers of `size_bytes`."""
        slot = arena.allocate(size_bytes)
        if slot is None:
            raise MemoryError(f"no room for {size_bytes} bytes in the arena")
        ctypes.memset(slot.address, 0, size_bytes)
        return cls(
            src=torch.ones(size_bytes, dtype=torch.uint8),
            dst=torch.frombuffer(slot, dtype=torch.uint8),
            slot=slot,
        )

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Destination, source and size."""
        return self.slot.address, self.src.data_ptr(), self.slot.nbytes


def contenders(threads: int) -> dict[str, Callable[[Pair], object]]:
    """Return what is compared, by name."""
    return {
        "memmove": lambda pair: ctypes.memmove(*pair.addresses),
        "numpy copyto": lambda pair: numpy.copyto(pair.dst.numpy(), pair.src.numpy()),
        "torch copy_, 1 thread": lambda pair: pair.dst.copy_(pair.src),
        f"torch copy_, {threads} threads": lambda pair: pair.dst.copy_(pair.src),
        "copy, 1 thread": lambda pair: _native.copy(*pair.addresses, 1),
        f"copy, {threads} threads": lambda pair: _native.copy(*pair.addresses, threads),
        "copy_crc32c, 1 thread": lambda pair: _native.copy_crc32c(*pair.addresses, 1),
        f"copy_crc32c, {threads} threads": lambda pair: _native.copy_crc32c(
            *pair.addresses, threads
        ),
        "crc32c alone": lambda pair: _native.crc32c(*pair.addresses[1:]),
    }


def measure(size_bytes: int, threads: int, rounds: int) -> dict[str, list[float]]:
    """Return GB/s of every round by contender."""
    count = max(2, FOOTPRINT_BYTES // (2 * size_bytes))
    arena = _native.Arena(count * size_bytes)
    pairs = [Pair.allocate(arena, size_bytes) for _ in range(count)]
    rates: dict[str, list[float]] = {}
    for round_number in range(rounds + 1):
        for name, copy in contenders(threads).items():
            torch.set_num_threads(threads if name.endswith("threads") else 1)
            copy(pairs[0])  # starts threads
            start = time.perf_counter()
            for pair in pairs:
                copy(pair)
            seconds = time.perf_counter() - start
            if round_number > 0:  # the first is a rehearsal
                rates.setdefault(name, []).append(count * size_bytes / seconds / 1e9)
    return rates


def summarize(size_mib: int, rates: dict[str, list[float]]) -> list[dict[str, object]]:
    """Return one row per contender, with its ratio to the best copy that is not the engine's."""
    medians = {name: statistics.median(rate) for name, rate in rates.items()}
    best_other = max(
        median for name, median in medians.items() if name.startswith(("mem", "numpy", "torch"))
    )
    return [
        {
            "size_mib": size_mib,
            "name": name,
            "median_gb_per_s": medians[name],
            "min_gb_per_s": min(rate),
            "max_gb_per_s": max(rate),
            "ratio_to_best_other": medians[name] / best_other,
        }
        for name, rate in rates.items()
    ]


def show(console: Console, rows: list[dict[str, object]]) -> None:
    """Print the table."""
    table = Table(title="memory copies, GB/s of bytes copied")
    for column in ("MiB", "copy", "median", "range", "ratio"):
        table.add_column(column, justify="left" if column == "copy" else "right")
    for row in rows:
        table.add_row(
            str(row["size_mib"]),
            str(row["name"]),
            f"{row['median_gb_per_s']:.1f}",
            f"{row['min_gb_per_s']:.1f}-{row['max_gb_per_s']:.1f}",
            f"{row['ratio_to_best_other']:.2f}",
            end_section=row["name"] == "crc32c alone",
        )
    console.print(table)


@click.command()
@click.option("--sizes", callback=numbers, default="1,4,16,64,256", show_default=True, help="MiB.")
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--quick", is_flag=True, help="Two sizes, three rounds.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(sizes: list[int], threads: int, rounds: int, quick: bool, as_json: bool) -> None:
    """Measure memory copies, and fail if the engine's are slower than they should be."""
    if quick:
        sizes, rounds = [4, TARGET_SIZE_MIB], 3
    rows: list[dict[str, object]] = []
    for size_mib in sizes:
        rows += summarize(size_mib, measure(size_mib * MIB, threads, rounds))
    judged = [
        row
        for row in rows
        if row["size_mib"] == TARGET_SIZE_MIB and row["name"] == f"copy, {threads} threads"
    ]
    passed = all(float(str(row["ratio_to_best_other"])) >= TARGET_RATIO for row in judged)
    if as_json:
        result = {
            "format": FORMAT_VERSION,
            "machine": {"cpus": os.cpu_count(), "processor": platform.machine()},
            "torch": torch.__version__,
            "rounds": rounds,
            "rows": rows,
            "target": {"ratio": TARGET_RATIO, "size_mib": TARGET_SIZE_MIB, "passed": passed},
        }
        click.echo(json.dumps(result, indent=2))
    else:
        console = Console()
        show(console, rows)
        for row in judged:
            console.print(
                f"copy of {TARGET_SIZE_MIB} MiB: {row['ratio_to_best_other']:.2f} of the best "
                f"other copy, target {TARGET_RATIO}: {'pass' if passed else 'FAIL'}"
            )
    sys.exit(0 if passed else 1)


if __name__ == "__main__":
    main()
