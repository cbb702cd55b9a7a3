"""Measured rates of the disk, through the engine that a session uses, and of fio beside it."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from offload.config import Config
from offload.engines import Engine, Request, Slot, open_engine
from offload.units import MIB

__all__ = ["Cell", "DiskRates", "FioRates", "fio_rates", "measure_copy", "measure_disk"]

EngineName: TypeAlias = Literal["native", "aio"] | None
_SLOTS = 4
_SLOT_BYTES = 8 * MIB  # 4 of them are a session's default window
MIN_FILE_BYTES = 64 * MIB
_COPY_SECONDS = 0.2


@dataclass(frozen=True)
class Cell:
    """A setting of the engine to measure."""

    io_threads: int
    io_block_bytes: int


@dataclass(frozen=True)
class DiskRates:
    """What the engine reached in one setting; each of the duplex rates with the other beside it."""

    io_threads: int
    io_block_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    duplex_write_bytes_per_s: float
    duplex_read_bytes_per_s: float


class _File:
    """A scratch file whose blocks are all written, and slots to move them through."""

    def __init__(self, config: Config, file_bytes: int) -> None:
        self._engine: Engine = open_engine(config)
        slot_bytes = max(_SLOT_BYTES, config.io_block_bytes)
        arena = self._engine.arena(_SLOTS * slot_bytes)
        slots = [arena.allocate(slot_bytes) for _ in range(_SLOTS)]
        self._slots: list[Slot] = [slot for slot in slots if slot is not None]
        self._offsets = range(0, max(1, file_bytes // slot_bytes) * slot_bytes, slot_bytes)
        try:
            self._engine.reserve(self._offsets[-1] + slot_bytes)
            self.move((True for _ in self._offsets), seconds=None)
        except BaseException:
            self.close()
            raise

    def move(self, writes: Iterable[bool], seconds: float | None) -> tuple[float, float]:
        """Write or read extent after extent, as ``writes`` says, for about ``seconds`` (or to the
        end); returns bytes per second written and read.
        """
        in_flight: list[Request | None] = [None] * len(self._slots)
        moved_bytes = {True: 0, False: 0}
        started = time.perf_counter()
        for number, is_write in enumerate(writes):
            turn, slot = number % len(self._slots), self._slots[number % len(self._slots)]
            pending, in_flight[turn] = in_flight[turn], None
            if pending is not None:
                pending.wait()
            late = seconds is not None and time.perf_counter() - started >= seconds
            if late and number >= len(self._slots):
                break
            offset = self._offsets[number % len(self._offsets)]
            if is_write:
                in_flight[turn] = self._engine.write(slot, offset)
            else:
                in_flight[turn] = self._engine.read(slot, offset, urgent=False, checksum=None)
            moved_bytes[is_write] += slot.nbytes
        for request in in_flight:
            if request is not None:
                request.wait()
        elapsed = time.perf_counter() - started
        return moved_bytes[True] / elapsed, moved_bytes[False] / elapsed

    def close(self) -> None:
        """Let go of threads and file."""
        self._engine.close()


def measure_disk(
    directory: str,
    cells: Iterable[Cell],
    *,
    file_bytes: int,
    seconds: float,
    rounds: int = 1,
    engine: EngineName = None,
    advance: Callable[[str], None] = lambda what: None,
) -> tuple[DiskRates, ...]:
    """The rates of every cell: medians of ``rounds`` passes of about ``seconds`` each.

    Args:
        directory: where the scratch file goes; nothing of it is left.
        cells: settings of the engine.
        file_bytes: size of the file; all of it is written before anything is measured, as blocks
            that exist are written faster than new ones.
        seconds: of one pass; there are three for each cell and round.
        rounds: passes of each kind.
        engine: ``"native"``, ``"aio"`` or None for what a session would take.
        advance: called before every cell with its name.

    Raises:
        OSError: the disk refused.
    """
    found = []
    for cell in cells:
        advance(f"disk, {cell.io_threads} threads, {cell.io_block_bytes // MIB} MiB")
        config = Config(
            device="cpu", disk_dir=directory, engine=engine, io_threads=cell.io_threads,
            io_block_bytes=cell.io_block_bytes,
        )  # fmt: skip
        file = _File(config, file_bytes)
        try:
            found.append(_rates(file, cell, seconds, rounds))
        finally:
            file.close()
    return tuple(found)


def _rates(file: _File, cell: Cell, seconds: float, rounds: int) -> DiskRates:
    many = range(1 << 30)
    passes: list[tuple[float, float, float, float]] = []
    file.move((False for _ in many), seconds)  # what was just written is slow to come for a while
    for _ in range(rounds):
        write = file.move((True for _ in many), seconds)[0]
        read = file.move((False for _ in many), seconds)[1]
        duplex = file.move((i % 2 == 0 for i in many), seconds)
        passes.append((write, read, *duplex))
    medians = (statistics.median(values) for values in zip(*passes, strict=True))
    return DiskRates(cell.io_threads, cell.io_block_bytes, *medians)


def measure_copy(directory: str, engine: EngineName = None) -> float:
    """Bytes per second at which the engine copies a storage into a slot."""
    opened = open_engine(Config(device="cpu", disk_dir=directory, engine=engine))
    try:
        storage = torch.ones(64 * MIB, dtype=torch.uint8).untyped_storage()
        slot = opened.arena(storage.nbytes()).allocate(storage.nbytes())
        assert slot is not None
        opened.copy(slot, storage, checksum=False)  # faults the pages in
        times: list[float] = []
        ends = time.perf_counter() + _COPY_SECONDS
        while not times or time.perf_counter() < ends:
            started = time.perf_counter()
            opened.copy(slot, storage, checksum=False)
            times.append(time.perf_counter() - started)
        return storage.nbytes() / statistics.median(times)
    finally:
        opened.close()


@dataclass(frozen=True)
class FioRates:
    """What fio reached on a file of the same size with two jobs."""

    version: str
    engine: str
    write_bytes_per_s: float
    read_bytes_per_s: float


def fio_rates(
    directory: str,
    *,
    block_bytes: int,
    file_bytes: int,
    seconds: float,
    advance: Callable[[str], None] = lambda what: None,
    program: str = "fio",
) -> FioRates | None:
    """The same two passes by fio; None where it is not installed or cannot run there.

    Its synchronous engine is run, which every kernel and container lets run, with two jobs and
    direct I/O. Its buffers lie in small pages unless the machine has free preallocated huge pages.
    """
    found = shutil.which(program)
    if found is None:
        return None
    path = os.path.join(directory, f".offload-probe-{os.getpid()}.fio")
    try:
        version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True)
        rates = []
        for mode in ("write", "read"):
            advance(f"fio, {mode}")
            rates.append(_fio_pass(found, path, mode, block_bytes, file_bytes, seconds))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError):
        return None
    finally:
        if os.path.exists(path):
            os.unlink(path)
    return FioRates(version.stdout.strip(), "psync, 2 jobs", *rates)


def _fio_pass(
    fio: str, path: str, mode: str, block_bytes: int, file_bytes: int, seconds: float
) -> float:
    share = file_bytes // 2 // block_bytes * block_bytes or block_bytes
    command = [
        *(fio, "--name=probe", f"--filename={path}", f"--rw={mode}", f"--bs={block_bytes}"),
        *("--ioengine=psync", "--thread", "--numjobs=2", "--group_reporting", "--direct=1"),
        *(f"--size={share}", f"--filesize={2 * share}", f"--offset_increment={share}"),
        *("--overwrite=1", "--time_based", f"--runtime={max(1, round(seconds * 1000))}ms"),
        "--output-format=json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0][mode]  # warnings may precede
    return float(job["io_bytes"]) / (float(job["runtime"]) / 1e3)
