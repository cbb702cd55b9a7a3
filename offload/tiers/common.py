"""What the parts of the tiers share: options, engine and lane, and the figures of the step."""

import contextlib
from collections.abc import Iterator

import torch

from offload.config import Config
from offload.engines import Engine
from offload.engines.store import DiskStore
from offload.errors import StorageError
from offload.lanes import Lane, Passage
from offload.report import Counters
from offload.report.trace import MOMENTS, WAITS, Subject, Trace, now_ns, ranged
from offload.system.machine import indexed
from offload.tensors.live import LiveBytes
from offload.tiers.gate import Gate
from offload.tiers.host import HostTier


class Common:
    """One for each session."""

    def __init__(self, config: Config, engine: Engine, lane: Lane, host: HostTier) -> None:
        self.config = config
        self.engine = engine
        self.lane = lane
        self.host = host
        self.store = DiskStore(engine, config.disk_dir, config.disk_bytes)
        self.trace = Trace()
        self.live = LiveBytes()
        self.counters = Counters()
        self.error: StorageError | None = None  # the first of this step
        self.gate = Gate(self.used_bytes)
        self.gate.limit_bytes = config.device_budget

    def used_bytes(self) -> int:
        """Device memory in use: all of it, or where that is host memory what we know of."""
        if self.lane.host_is_device:
            return self.live.alive_bytes + self.host.held_bytes
        return torch.accelerator.memory_allocated(indexed(self.config.device))

    def fail(self, error: StorageError) -> None:
        """Note the step's first failure of the disk; nothing more is sent there until the next."""
        if self.error is None:
            # Kept without its traceback, whose frames hold blocks and reservations.
            self.error = error.with_traceback(None)
            outcome = (
                "Tensors stay in memory for the rest of this step"
                if not self.counters.ended_ns
                else "It was still under way when its step had ended; the bytes stay in memory"
            )
            self.counters.warnings[f"{error}. {outcome}"] += 1

    def begun(self, lane: str, depth: int) -> None:
        """Note how many transfers of ``lane`` are on their way, after one more was started."""
        figures = self.counters.lanes[lane]
        if depth > figures.peak_depth:
            figures.peak_depth = depth

    def moved(
        self, lane: str, nbytes: int, start_ns: int, end_ns: int, about: Subject, *, waited: bool
    ) -> None:
        """Count a transfer that has completed. ``waited``: the thread that trains made it."""
        self.trace.add((lane, about.block, nbytes, start_ns, end_ns, about))
        figures = self.counters.lanes[lane]
        figures.nbytes += nbytes
        figures.operations += 1
        figures.intervals.append((start_ns, end_ns))
        if waited:
            self.counters.waits.append((start_ns, end_ns))

    def waited(self, kind: str, start_ns: int, end_ns: int, about: Subject) -> None:
        """Count time that the computation has waited; ``kind`` is one of ``WAITS``."""
        self.trace.emit(kind, about.block, 0, start_ns, end_ns, about)
        self.counters.wait(kind, start_ns, end_ns, about)

    @contextlib.contextmanager
    def waiting(self, kind: str, about: Subject) -> Iterator[None]:
        """What is done inside is waiting by the host; count it."""
        start_ns = now_ns()
        try:
            with ranged(f"offload::{kind}"):
                yield
        finally:
            self.waited(kind, start_ns, now_ns(), about)

    def mark(self, moment: str) -> None:
        """Note that the computation has come to ``moment``, by the device's clock if it has one."""
        if not self.lane.mark(moment, self.config.device):
            self.trace.emit(moment, -1, 0)

    def note(self, passage: Passage) -> None:
        """Count what a lane's device did meanwhile: a copy, a wait of the computation, a moment."""
        name, nbytes, start_ns, end_ns, about = passage
        if name in WAITS:
            self.waited(name, start_ns, end_ns, about)
        elif name in MOMENTS:
            self.trace.emit(name, -1, 0, start_ns, end_ns)
        else:
            self.moved(name, nbytes, start_ns, end_ns, about, waited=False)

    def sample(self) -> None:
        """Look at the bytes in use, where they may just have reached a peak."""
        held_bytes, live_bytes = self.host.held_bytes, self.live.alive_bytes
        if self.lane.host_is_device:
            live_bytes += held_bytes
        counters = self.counters  # max() is a call, and this is asked three times a tensor
        if held_bytes > counters.peak_arena_bytes:
            counters.peak_arena_bytes = held_bytes
        if live_bytes > counters.peak_live_bytes:
            counters.peak_live_bytes = live_bytes
        self.trace.add_sample((now_ns(), live_bytes, held_bytes, self.store.used_bytes))
