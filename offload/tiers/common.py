"""What the parts of the tiers share: options, engine and lane, and the figures of the step."""

from offload.config import Config
from offload.engines import Engine
from offload.errors import StorageError
from offload.heap import Heap
from offload.lanes import Lane, Passage
from offload.live import LiveBytes
from offload.report import Counters
from offload.tiers.host import HostTier
from offload.trace import Trace, now_ns


class Common:
    """One for each session."""

    def __init__(self, config: Config, engine: Engine, lane: Lane, host: HostTier) -> None:
        self.config = config
        self.engine = engine
        self.lane = lane
        self.host = host
        self.heap = Heap(config.heap_trim_bytes if lane.host_is_device else 0)
        self.trace = Trace()
        self.live = LiveBytes()
        self.counters = Counters()
        self.error: StorageError | None = None  # the first of this step

    def fail(self, error: StorageError) -> None:
        """Note the step's first failure of the disk; nothing more is sent there until the next."""
        if self.error is None:
            # Kept without its traceback, whose frames hold blocks and reservations.
            self.error = error.with_traceback(None)
            self.counters.warnings[
                f"{error}. Tensors stay in memory for the rest of this step"
            ] += 1

    def waited(self, counter: str, started_ns: int) -> None:
        """Count time that the computation has waited since ``started_ns``."""
        ended_ns = now_ns()
        self._count_wait(counter, started_ns, ended_ns)
        self.trace.emit(counter.removesuffix("_ns"), -1, 0, started_ns, ended_ns)

    def note(self, passages: list[Passage]) -> None:
        """Count what a lane's device did meanwhile: copies, and waits of the computation."""
        for name, nbytes, start_ns, end_ns in passages:
            self.trace.emit(name, -1, nbytes, start_ns, end_ns)
            if name in ("stall", "backpressure"):
                self._count_wait(f"{name}_ns", start_ns, end_ns)
            else:
                self.counters.transfers.append((start_ns, end_ns))

    def _count_wait(self, counter: str, start_ns: int, end_ns: int) -> None:
        waited_ns = getattr(self.counters, counter) + end_ns - start_ns
        setattr(self.counters, counter, waited_ns)
        self.counters.waits.append((start_ns, end_ns))

    def sample(self) -> None:
        """Look at the bytes in use, where they may just have reached a peak."""
        held_bytes = self.host.held_bytes
        counters = self.counters
        counters.peak_arena_bytes = max(counters.peak_arena_bytes, held_bytes)
        live_bytes = self.live.alive_bytes + (held_bytes if self.lane.host_is_device else 0)
        counters.peak_live_bytes = max(counters.peak_live_bytes, live_bytes)
