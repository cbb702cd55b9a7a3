"""Measure the disk: the native engine against fio, one-thread pwrite, aiofiles and torch.save.

Every contender moves the same bytes in the same blocks, in turn, round after round; the table shows
medians and ranges. Files are preallocated and written before anything is measured. CPU is user plus
system time of the contender's process: the engine's includes the Python that submits. What goes
through the page cache is timed until it is on the disk (fdatasync) and read after the cache was
dropped; the write-back itself costs CPU in the kernel that no process is charged with.

The engine and fio use one and the same file, as two files on one disk may differ by a tenth and
more, filled with random bytes. Two numbers must be equal for a comparison. Bandwidth: the memory
that is cycled through. The engine's slots hold 16 blocks, so fio with 16 in flight, and hence 16
buffers, is its measure; fewer stay in the processor's cache, and where the disk is a virtual one,
whose host copies the bytes, that alone makes reads faster by a seventh. CPU time: the blocks that
the kernel has at a time. The more it has, the more of them share a wake-up of the disk and one of
the thread, and the longer an urgent read waits behind them. The engine gives it one for each of its
threads, so fio with as many in flight judges it; the thriftiest of all is named beside that.

fio runs with its default 4 KiB buffer pages and, where the kernel has or grants enough of them,
with huge pages, which is what the engine uses. Run as root, the script raises vm.nr_hugepages for
that long and puts it back.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from io_contenders import (
    MODES,
    SLOT_BLOCKS,
    AioFiles,
    Contender,
    Engine,
    Fio,
    OneThread,
    Sample,
    Scratch,
    TorchSave,
)
from listed import numbers
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from offload.units import MIB

FORMAT_VERSION = 2
TARGET_RATIO = 0.95
HUGE_PAGES_PATH = Path("/proc/sys/vm/nr_hugepages")


def median_of(values: Iterable[float | None]) -> float | None:
    """Return the median of what is known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass(frozen=True)
class Row:
    """All passes of one contender in one mode."""

    contender: str
    pages: str
    mode: str
    median_gb_per_s: float
    min_gb_per_s: float
    max_gb_per_s: float
    median_cpu_s_per_gb: float | None
    median_worker_cpu_s_per_gb: float | None
    in_flight: int

    @classmethod
    def of(cls, contender: Contender, mode: str, samples: list[Sample]) -> Row:
        """Summarize `samples`."""
        rates = [sample.gb_per_s for sample in samples]
        return cls(
            contender.name,
            contender.pages,
            mode,
            statistics.median(rates),
            min(rates),
            max(rates),
            median_of(sample.cpu_s_per_gb for sample in samples),
            median_of(sample.worker_cpu_s_per_gb for sample in samples),
            contender.in_flight,
        )


@contextlib.contextmanager
def huge_pages(wanted: int) -> Iterator[bool]:
    """Tell whether `wanted` huge pages are free, raising their number meanwhile if allowed."""
    before = HUGE_PAGES_PATH.read_text()
    with contextlib.suppress(OSError):  # not root, or a container
        HUGE_PAGES_PATH.write_text(str(int(before) + wanted))
    try:
        meminfo = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in meminfo if "HugePages_Free" in line)
        yield free >= wanted
    finally:
        if HUGE_PAGES_PATH.read_text() != before:
            HUGE_PAGES_PATH.write_text(before)


def make_contenders(
    sizes: tuple[Path, int, int], threads: list[int], quick: bool, has_huge_pages: bool
) -> list[Contender]:
    """Return all that can run here, for a directory, and bytes of a pass and of a block."""
    directory, size_bytes, _ = sizes
    scratch = Scratch(directory, size_bytes)
    contenders: list[Contender] = [Engine(*sizes, scratch, count) for count in threads]
    if not quick:
        contenders += [OneThread(*sizes), AioFiles(*sizes), TorchSave(*sizes)]
    if not shutil.which("fio"):
        return contenders
    engines = ("io_uring", "psync") if quick else ("io_uring", "libaio", "psync")
    for in_flight in sorted({*threads, SLOT_BLOCKS}, reverse=True):
        for engine in engines:
            is_shown_small = engine == "io_uring" and in_flight == SLOT_BLOCKS
            for memory in (["mmaphuge"] if has_huge_pages else []) + ["malloc"] * is_shown_small:
                with contextlib.suppress(OSError):  # io_uring is forbidden in many containers
                    contenders.append(Fio(*sizes, scratch, engine, in_flight, memory))
    return contenders


def measure_all(contenders: list[Contender], rounds: int, console: Console) -> list[Row]:
    """Measure all in turn, `rounds` times, every other time in the opposite order."""
    samples: dict[tuple[Contender, str], list[Sample]] = {
        (contender, mode): []
        for mode in MODES
        for contender in contenders
        if mode in contender.modes
    }
    # A thread that redraws would cost the engine's process CPU time.
    with Progress(console=console, transient=True, auto_refresh=False) as progress:
        task = progress.add_task("measuring", total=rounds * len(samples))
        for number in range(rounds):
            turns = list(samples.items())
            for (contender, mode), taken in reversed(turns) if number % 2 else turns:
                taken.append(contender.measure(mode))
                progress.advance(task)
                progress.refresh()
    return [Row.of(contender, mode, taken) for (contender, mode), taken in samples.items()]


def cpu_of(row: Row) -> float:
    """Return its CPU time, to find the least by."""
    return math.inf if row.median_cpu_s_per_gb is None else row.median_cpu_s_per_gb


def judge(rows: list[Row]) -> list[dict[str, object]]:
    """Compare each engine with the fios of its mode and buffer pages: its rate with the fastest
    that uses as many buffers, its workers' CPU time with that of as many jobs that make the same
    system calls. What asynchronous ones use is shown beside it (csrc/queue.h: why not io_uring).
    """
    verdicts: list[dict[str, object]] = []
    for ours in rows:
        if not ours.contender.startswith("engine") or ours.mode == "duplex":
            continue
        fios = [
            row
            for row in rows
            if row.contender.startswith("fio") and (row.mode, row.pages) == (ours.mode, ours.pages)
        ]
        as_large = [row for row in fios if row.in_flight == SLOT_BLOCKS]
        as_deep = [row for row in fios if row.in_flight == ours.in_flight]
        alike = [row for row in as_deep if "psync" in row.contender]
        if not as_large or not alike:
            continue
        fastest = max(as_large, key=lambda row: row.median_gb_per_s)
        equal, thriftiest = min(alike, key=cpu_of), min(as_deep, key=cpu_of)
        ratio = ours.median_gb_per_s / fastest.median_gb_per_s
        verdicts.append(
            {
                "mode": ours.mode,
                "contender": ours.contender,
                "pages": ours.pages,
                "fastest": fastest.contender,
                "ratio": ratio,
                "fast_enough": ratio >= TARGET_RATIO,
                "cpu_s_per_gb": cpu_of(ours),
                "worker_cpu_s_per_gb": ours.median_worker_cpu_s_per_gb,
                "equal": equal.contender,
                "equal_cpu_s_per_gb": cpu_of(equal),
                "cheap_enough": (ours.median_worker_cpu_s_per_gb or math.inf) <= cpu_of(equal),
                "thriftiest": thriftiest.contender,
                "thriftiest_cpu_s_per_gb": cpu_of(thriftiest),
            }
        )
    return verdicts


def show(console: Console, rows: list[Row], verdicts: list[dict[str, object]]) -> None:
    """Print the table and the verdicts."""
    table = Table(title="disk, GB/s and CPU seconds per GB")
    for column in ("mode", "contender", "pages"):
        table.add_column(column)
    for column in ("median", "range", "CPU s/GB"):
        table.add_column(column, justify="right")
    previous = rows[0].mode
    for row in rows:
        if row.mode != previous:
            table.add_section()
            previous = row.mode
        table.add_row(
            row.mode,
            row.contender,
            row.pages,
            f"{row.median_gb_per_s:.2f}",
            f"{row.min_gb_per_s:.2f}-{row.max_gb_per_s:.2f}",
            "" if row.median_cpu_s_per_gb is None else f"{row.median_cpu_s_per_gb:.4f}",
        )
    console.print(table)
    if not verdicts:
        console.print("fio is not installed, or got no huge pages: no verdict")
    for verdict in verdicts:
        console.print(
            f"{verdict['mode']}, {verdict['contender']} ({verdict['pages']} pages): "
            f"{verdict['ratio']:.2f} of {verdict['fastest']}, target {TARGET_RATIO}: "
            f"{'pass' if verdict['fast_enough'] else 'FAIL'}\n  CPU s/GB "
            f"{verdict['cpu_s_per_gb']:.4f} (workers {verdict['worker_cpu_s_per_gb']:.4f}) "
            f"against {verdict['equal_cpu_s_per_gb']:.4f} of {verdict['equal']}: "
            f"{'pass' if verdict['cheap_enough'] else 'FAIL'} "
            f"(least at this depth {verdict['thriftiest_cpu_s_per_gb']:.4f}, "
            f"{verdict['thriftiest']})"
        )


@click.command()
@click.option("--dir", "directory", default=tempfile.gettempdir(), help="Where the files go.")
@click.option("--size", default=1024, show_default=True, help="MiB that one pass moves.")
@click.option("--block", type=click.IntRange(min=1), default=4, help="MiB of one system call.")
@click.option(
    "--threads", callback=numbers, default="2,4", show_default=True, help="Workers of the engine."
)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--quick", is_flag=True, help="256 MiB, two rounds, engine and fio.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(
    directory: str,
    size: int,
    block: int,
    threads: list[int],
    rounds: int,
    quick: bool,
    as_json: bool,
) -> None:
    """Measure the disk, and fail if the engine misses its targets."""
    if not all(1 <= count <= 64 for count in threads):
        raise click.UsageError("--threads: 1 to 64")
    if quick:
        size, rounds = 256, 2
    if size < 1 or size % (8 * block):
        raise click.UsageError("--size must be a multiple of 8 blocks")
    console = Console(stderr=as_json)
    wanted_pages = SLOT_BLOCKS * (block // 2 + 1) + 8 * SLOT_BLOCKS
    try:
        with (
            tempfile.TemporaryDirectory(prefix="offload-bench-", dir=directory) as files,
            huge_pages(wanted_pages) as has_huge_pages,
        ):
            sizes = (Path(files), size * MIB, block * MIB)
            contenders = make_contenders(sizes, threads, quick, has_huge_pages)
            rows = measure_all(contenders, rounds, console)
    except OSError as error:
        console.print(f"bench_io: {error}", style="red")
        sys.exit(2)
    verdicts = judge(rows)
    if as_json:
        result = {
            "format": FORMAT_VERSION,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "size_mib": size,
            "block_mib": block,
            "rounds": rounds,
            "rows": [asdict(row) for row in rows],
            "verdicts": verdicts,
        }
        click.echo(json.dumps(result, indent=2))
    else:
        show(console, rows, verdicts)
    sys.exit(0 if all(v["fast_enough"] and v["cheap_enough"] for v in verdicts) else 1)


if __name__ == "__main__":
    main()
