"""What bench_io.py compares: the native engine, fio, and what Python programs do instead."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import aiofiles
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import _native

# Blocks that the engine's slots hold: fio with as many in flight has as many buffers.
SLOT_BLOCKS = 16
# Times that one sample of the engine or of fio moves its bytes: fio tells CPU time in milliseconds.
PASSES = 2
# With more, what it rounds off is as much as what it tells.
MOST_EXACT_JOBS = 4
MODES = ("write", "read", "duplex")
# fio fills the buffers of jobs that may write before it starts the clock. Those of one that only
# reads it would first touch, and the kernel clear, while that runs.
FIO_MIX = {
    "write": ("--rw=write",),
    "read": ("--rw=rw", "--rwmixread=100"),
    "duplex": ("--rw=rw", "--rwmixread=50"),
}


@dataclass(frozen=True)
class Sample:
    """One pass of one contender."""

    gb_per_s: float
    cpu_s_per_gb: float | None  # nothing: not told exactly enough
    worker_cpu_s_per_gb: float | None = None  # of the engine's threads, without who submits


class Contender:
    """Something that moves `size_bytes` to or from a file of its own in `directory`."""

    name = ""
    pages = "4 KiB"
    in_flight = 1  # blocks that the kernel has at a time
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

    passes = 1

    def measure(self, mode: str) -> Sample:
        """Time one sample."""
        move: Callable[[], None] = getattr(self, mode)
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for _ in range(self.passes):
            move()
        seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        gigabytes = self.passes * self.size_bytes / 1e9
        return Sample(gigabytes / seconds, cpu / gigabytes)


class Scratch:
    """The engine's nameless file, and a path by which fio opens the same one."""

    def __init__(self, directory: Path, size_bytes: int) -> None:
        """Create and reserve it; whoever uses it first writes all of it."""
        self.file = _native.File(str(directory))
        self.file.reserve(size_bytes)
        start = f"{directory.resolve()}/"
        descriptors = Path("/proc/self/fd").iterdir()
        number = next(link.name for link in descriptors if _target(link).startswith(start))
        self.path = Path(f"/proc/{os.getpid()}/fd/{number}")


def _target(link: Path) -> str:
    """Return what the descriptor is of; nothing if it is closed by now."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


class Engine(Contender):
    """The native queue, fed with slots of four blocks, a few of them in flight."""

    modes = MODES
    passes = PASSES

    def __init__(
        self, directory: Path, size_bytes: int, block_bytes: int, scratch: Scratch, threads: int
    ) -> None:
        """Create the slots, with bytes that no disk can take for a hole."""
        super().__init__(directory, size_bytes, block_bytes)
        self.name = f"engine, {threads} threads"
        self.in_flight = threads
        self.queue = _native.Queue(scratch.file, threads=threads, block_bytes=block_bytes)
        self.slot_bytes = SLOT_BLOCKS // 4 * block_bytes
        self.arena = _native.Arena(4 * self.slot_bytes)
        self.slots = [self._filled_slot() for _ in range(4)]
        self.pages = "2 MiB" if self.arena.page_bytes > 4096 else "4 KiB"
        self.write()

    def measure(self, mode: str) -> Sample:
        """Time one sample, and tell the workers from the Python that submits."""
        before_ns = self.queue.stats()["cpu_ns"]
        sample = super().measure(mode)
        worker_s = (self.queue.stats()["cpu_ns"] - before_ns) / 1e9
        gigabytes = self.passes * self.size_bytes / 1e9
        return replace(sample, worker_cpu_s_per_gb=worker_s / gigabytes)

    def _filled_slot(self) -> _native.Slot:
        slot = self.arena.allocate(self.slot_bytes)
        assert slot is not None
        torch.frombuffer(slot, dtype=torch.uint8).random_()
        return slot

    def _move(self, kinds: Callable[[int], bool]) -> None:
        """Move extent i by a write if `kinds(i)`, else by a read, a slot at a time."""
        in_flight: list[_native.Request | None] = [None] * len(self.slots)
        for i in range(self.size_bytes // self.slot_bytes):
            turn = i % len(self.slots)
            pending = in_flight[turn]
            if pending is not None:
                pending.wait()
            move = self.queue.write if kinds(i) else self.queue.read
            in_flight[turn] = move(self.slots[turn], i * self.slot_bytes)
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
        self,
        directory: Path,
        size_bytes: int,
        block_bytes: int,
        scratch: Scratch,
        engine: str,
        in_flight: int,
        memory: str,
    ) -> None:
        """Try it once. psync has a thread for each block in flight, the others have one."""
        super().__init__(directory, size_bytes, block_bytes)
        self.scratch, self.engine, self.memory = scratch, engine, memory
        self.in_flight = in_flight
        self.jobs = in_flight if engine == "psync" else 1
        self.pages = "2 MiB" if memory == "mmaphuge" else "4 KiB"
        self.name = f"fio {engine}, {'jobs' if engine == 'psync' else 'depth'} {in_flight}"
        self.measure("write")

    def measure(self, mode: str) -> Sample:
        """Take one sample."""
        jobs = self.jobs
        command = [
            *("fio", "--name=pass", f"--filename={self.scratch.path}"),
            *(*FIO_MIX[mode], f"--bs={self.block_bytes}"),
            *(
                f"--ioengine={self.engine}",
                f"--iodepth={self.in_flight // jobs}",
                f"--loops={PASSES}",
            ),
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
        if jobs > MOST_EXACT_JOBS:
            return Sample(gigabytes / runtime_s, None)
        # Of each job it rounds user and system time down to milliseconds: half of one each.
        rounded_s = jobs * 2 * 0.5e-3
        cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1e3 + rounded_s
        return Sample(gigabytes / runtime_s, cpu_s / gigabytes)
