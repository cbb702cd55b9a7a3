"""Measure the disk: the native engine against fio, one-thread pwrite, aiofiles and torch.save.

Every contender moves the same bytes in the same blocks, in turn, round after round; the table shows
medians and ranges. Files are preallocated and written before anything is measured. CPU is user plus
system time of the contender's process. What goes through the page cache is timed until it is on the
disk (fdatasync) and read after the cache was dropped; the write-back itself costs CPU in the kernel
that no process is charged with.

fio runs with its default 4 KiB buffer pages and, where the kernel has or grants enough of them,
with huge pages, which is what the engine uses. Run as root, the script raises vm.nr_hugepages for
that long and puts it back.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import aiofiles
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import _native

FORMAT_VERSION = 1
MIB = 1 << 20
TARGET_RATIO = 0.95
FIO_DEPTH = 16
HUGE_PAGES_PATH = Path("/proc/sys/vm/nr_hugepages")
MODES = ("write", "read", "duplex")


@dataclass(frozen=True)
class Sample:
    """One pass of one contender."""

    gb_per_s: float
    cpu_s_per_gb: float


@dataclass(frozen=True)
class Row:
    """All passes of one contender in one mode."""

    contender: str
    pages: str
    mode: str
    median_gb_per_s: float
    min_gb_per_s: float
    max_gb_per_s: float
    median_cpu_s_per_gb: float

    @classmethod
    def of(cls, contender: str, pages: str, mode: str, samples: list[Sample]) -> Row:
        """Summarize `samples`."""
        rates = [sample.gb_per_s for sample in samples]
        return cls(
            contender,
            pages,
            mode,
            statistics.median(rates),
            min(rates),
            max(rates),
            statistics.median(sample.cpu_s_per_gb for sample in samples),
        )


class Contender:
    """Something that moves `size_bytes` to or from a file of its own in `directory`."""

    name = ""
    pages = "4 KiB"
    modes: tuple[str, ...] = ("write", "read")

    def __init__(self, directory: Path, size_bytes: int, block_bytes: int) -> None:
        """Create the file, with all its blocks written."""
        self.directory = directory
        self.size_bytes = size_bytes
        self.block_bytes = block_bytes

    def write(self) -> None:
        """Write every byte."""
        raise NotImplementedError

    def read(self) -> None:
        """Read every byte."""
        raise NotImplementedError

    def duplex(self) -> None:
        """Write one half while the other half is read."""
        raise NotImplementedError

    def measure(self, mode: str) -> Sample:
        """Time one pass."""
        move: Callable[[], None] = getattr(self, mode)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        move()
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        gigabytes = self.size_bytes / 1e9
        return Sample(gigabytes / seconds, cpu / gigabytes)


class Engine(Contender):
    """The native queue, fed with slots of four blocks, a few of them in flight."""

    modes = MODES
    threads = 2

    def __init__(self, directory: Path, size_bytes: int, block_bytes: int) -> None:
        """Create the file and the slots."""
        super().__init__(directory, size_bytes, block_bytes)
        self.name = f"engine, {self.threads} threads"
        self.file = _native.File(str(directory))
        self.file.reserve(size_bytes)
        self.queue = _native.Queue(self.file, threads=self.threads, block_bytes=block_bytes)
        self.slot_bytes = min(4 * block_bytes, size_bytes // 2)
        self.arena = _native.Arena(4 * self.slot_bytes)
        self.slots = [self.arena.allocate(self.slot_bytes) for _ in range(4)]
        self.pages = "2 MiB" if self.arena.page_bytes > 4096 else "4 KiB"
        self.write()

    def _move(self, kinds: Callable[[int], bool]) -> None:
        """Move extent i by a write if `kinds(i)`, else by a read, a slot at a time."""
        in_flight: list[_native.Request | None] = [None] * len(self.slots)
        for i in range(self.size_bytes // self.slot_bytes):
            turn = i % len(self.slots)
            pending, slot = in_flight[turn], self.slots[turn]
            assert slot is not None
            if pending is not None:
                pending.wait()
            move = self.queue.write if kinds(i) else self.queue.read
            in_flight[turn] = move(slot, i * self.slot_bytes)
        for pending in in_flight:
            if pending is not None:
                pending.wait()

    def write(self) -> None:
        """Write every extent."""
        self._move(lambda i: True)

    def read(self) -> None:
        """Read every extent."""
        self._move(lambda i: False)

    def duplex(self) -> None:
        """Write the even extents and read the odd ones."""
        self._move(lambda i: i % 2 == 0)


class Engine4(Engine):
    """The same with four threads."""

    threads = 4


class OneThread(Contender):
    """pwrite and pread with O_DIRECT, one block after the other."""

    name = "one thread, pwrite"

    def __init__(self, directory: Path, size_bytes: int, block_bytes: int) -> None:
        """Create the file and a page-aligned buffer."""
        super().__init__(directory, size_bytes, block_bytes)
        self.descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        self.buffer = mmap.mmap(-1, block_bytes)
        self.buffer.write(b"x" * block_bytes)
        self.write()

    def write(self) -> None:
        """Write block by block."""
        for offset in range(0, self.size_bytes, self.block_bytes):
            os.pwrite(self.descriptor, self.buffer, offset)

    def read(self) -> None:
        """Read block by block."""
        for offset in range(0, self.size_bytes, self.block_bytes):
            os.preadv(self.descriptor, [self.buffer], offset)


class Cached(Contender):
    """Base of what goes through the page cache, to a named file."""

    def __init__(self, directory: Path, size_bytes: int, block_bytes: int) -> None:
        """Write the file once."""
        super().__init__(directory, size_bytes, block_bytes)
        self.path = directory / f"{type(self).__name__}.bin"
        self.path.touch()
        self.write()

    def measure(self, mode: str) -> Sample:
        """Time one pass that starts with nothing cached."""
        with self.path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return super().measure(mode)


class AioFiles(Cached):
    """aiofiles, block by block."""

    name = "aiofiles"

    def write(self) -> None:
        """Write block by block, then wait for the disk."""

        async def run() -> None:
            block = bytes(self.block_bytes)
            async with aiofiles.open(self.path, "r+b", buffering=0) as file:
                for _ in range(0, self.size_bytes, self.block_bytes):
                    await file.write(block)
                await asyncio.to_thread(os.fdatasync, file.fileno())

        asyncio.run(run())

    def read(self) -> None:
        """Read block by block."""

        async def run() -> None:
            async with aiofiles.open(self.path, "rb", buffering=0) as file:
                while await file.read(self.block_bytes):
                    pass

        asyncio.run(run())


class TorchSave(Cached):
    """torch.save and torch.load of one tensor."""

    name = "torch.save"

    def __init__(self, directory: Path, size_bytes: int, block_bytes: int) -> None:
        """Make the tensor."""
        self.tensor = torch.ones(size_bytes, dtype=torch.uint8)
        super().__init__(directory, size_bytes, block_bytes)

    def write(self) -> None:
        """Save, then wait for the disk."""
        with self.path.open("r+b") as file:
            torch.save(self.tensor, file)
            file.flush()
            os.fdatasync(file.fileno())

    def read(self) -> None:
        """Load."""
        torch.load(self.path)


class Fio(Contender):
    """fio in a process of its own, with the rates and CPU time that it reports."""

    modes = MODES

    def __init__(
        self, directory: Path, size_bytes: int, block_bytes: int, engine: str, memory: str
    ) -> None:
        """Let fio write its file once; all its engines share it."""
        super().__init__(directory, size_bytes, block_bytes)
        self.engine, self.memory = engine, memory
        self.pages = "2 MiB" if memory == "mmaphuge" else "4 KiB"
        self.name = f"fio {engine}, " + ("2 jobs" if engine == "psync" else f"depth {FIO_DEPTH}")
        self.measure("write")

    def measure(self, mode: str) -> Sample:
        """Run one pass."""
        jobs = 2 if self.engine == "psync" else 1
        command = [
            *("fio", "--name=pass", f"--filename={self.directory / 'fio.bin'}"),
            *(f"--rw={'rw' if mode == 'duplex' else mode}", f"--bs={self.block_bytes}"),
            *(f"--ioengine={self.engine}", f"--iodepth={1 if jobs > 1 else FIO_DEPTH}"),
            *("--thread", f"--numjobs={jobs}", "--group_reporting"),
            *(f"--size={self.size_bytes // jobs}", f"--filesize={self.size_bytes}"),
            *(f"--offset_increment={self.size_bytes // jobs}", "--direct=1", "--overwrite=1"),
            *(f"--mem={self.memory}", "--scramble_buffers=0", "--output-format=json"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"fio failed: {(done.stderr or done.stdout).strip()[:300]}")
        # Warnings may precede the JSON.
        job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
        gigabytes = (job["read"]["io_bytes"] + job["write"]["io_bytes"]) / 1e9
        runtime_s = max(job["read"]["runtime"], job["write"]["runtime"]) / 1e3
        cpu_share = (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Sample(gigabytes / runtime_s, cpu_share * job["job_runtime"] / 1e3 / gigabytes)


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
    arguments: argparse.Namespace, directory: Path, has_huge_pages: bool
) -> list[Contender]:
    """Return all that can run here."""
    sizes = (directory, arguments.size * MIB, arguments.block * MIB)
    contenders: list[Contender] = [Engine(*sizes)]
    if not arguments.quick:
        contenders += [Engine4(*sizes), OneThread(*sizes), AioFiles(*sizes), TorchSave(*sizes)]
    if shutil.which("fio"):
        for memory in ("mmaphuge", "malloc") if has_huge_pages else ("malloc",):
            for engine in ("io_uring",) if arguments.quick else ("io_uring", "libaio", "psync"):
                with contextlib.suppress(OSError):  # io_uring is forbidden in many containers
                    contenders.append(Fio(*sizes, engine=engine, memory=memory))
    return contenders


def measure_all(contenders: list[Contender], rounds: int, console: Console) -> list[Row]:
    """Measure all in turn, `rounds` times."""
    samples: dict[tuple[Contender, str], list[Sample]] = {
        (contender, mode): []
        for mode in MODES
        for contender in contenders
        if mode in contender.modes
    }
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=rounds * len(samples))
        for _ in range(rounds):
            for (contender, mode), taken in samples.items():
                taken.append(contender.measure(mode))
                progress.advance(task)
    return [
        Row.of(contender.name, contender.pages, mode, taken)
        for (contender, mode), taken in samples.items()
    ]


def judge(rows: list[Row]) -> list[dict[str, object]]:
    """Compare the engine with the best fio of the same buffer pages, for writes and for reads."""
    verdicts: list[dict[str, object]] = []
    for mode in ("write", "read"):
        ours = next(
            row for row in rows if row.mode == mode and row.contender == "engine, 2 threads"
        )
        fios = [row for row in rows if row.mode == mode and row.contender.startswith("fio")]
        peers = [row for row in fios if row.pages == ours.pages]
        if not peers:
            continue
        best = max(peers, key=lambda row: row.median_gb_per_s)
        ratio = ours.median_gb_per_s / best.median_gb_per_s
        verdicts.append(
            {
                "mode": mode,
                "against": best.contender,
                "pages": best.pages,
                "ratio": ratio,
                "fast_enough": ratio >= TARGET_RATIO,
                "cpu_s_per_gb": ours.median_cpu_s_per_gb,
                "fio_cpu_s_per_gb": best.median_cpu_s_per_gb,
                "cheap_enough": ours.median_cpu_s_per_gb <= best.median_cpu_s_per_gb,
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
            f"{row.median_cpu_s_per_gb:.4f}",
        )
    console.print(table)
    if not verdicts:
        console.print("fio is not installed, or got no huge pages: no verdict")
    for verdict in verdicts:
        console.print(
            f"{verdict['mode']}: {verdict['ratio']:.2f} of {verdict['against']} "
            f"({verdict['pages']} pages), target {TARGET_RATIO}: "
            f"{'pass' if verdict['fast_enough'] else 'FAIL'}; "
            f"CPU {verdict['cpu_s_per_gb']:.4f} against {verdict['fio_cpu_s_per_gb']:.4f} s/GB: "
            f"{'pass' if verdict['cheap_enough'] else 'FAIL'}"
        )


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dir", default=tempfile.gettempdir(), help="where the files go")
    parser.add_argument("--size", type=int, default=1024, help="MiB that one pass moves")
    parser.add_argument("--block", type=int, default=4, help="MiB of one system call")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="256 MiB, two rounds, engine and fio")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.size, arguments.rounds = 256, 2
    if min(arguments.block, arguments.rounds) < 1 or arguments.size % (8 * arguments.block) != 0:
        parser.error("--rounds and --block must be at least 1, --size a multiple of 8 blocks")
    return arguments


def main() -> int:
    """Run, print, and fail if the engine misses its targets."""
    arguments = parse_arguments()
    console = Console(stderr=arguments.json)
    wanted_pages = FIO_DEPTH * (arguments.block // 2 + 1) + 8
    try:
        with (
            tempfile.TemporaryDirectory(prefix="offload-bench-", dir=arguments.dir) as directory,
            huge_pages(wanted_pages) as has_huge_pages,
        ):
            contenders = make_contenders(arguments, Path(directory), has_huge_pages)
            rows = measure_all(contenders, arguments.rounds, console)
    except OSError as error:
        console.print(f"bench_io: {error}", style="red")
        return 2
    verdicts = judge(rows)
    if arguments.json:
        result = {
            "format": FORMAT_VERSION,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "size_mib": arguments.size,
            "block_mib": arguments.block,
            "rounds": arguments.rounds,
            "rows": [asdict(row) for row in rows],
            "verdicts": verdicts,
        }
        print(json.dumps(result, indent=2))
    else:
        show(console, rows, verdicts)
    return 0 if all(v["fast_enough"] and v["cheap_enough"] for v in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
