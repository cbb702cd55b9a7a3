"""Counters: what is counted while a step runs. Values only; ``StepReport`` makes sense of them."""

import time
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import chain

from offload.report.trace import TRANSFERS, Interval, Subject, merged

_MAX_INTERVALS = 1 << 16  # per step; beyond it the oldest no longer count towards the overlap
_MAX_WAITED_FOR = 1 << 10  # different things a step waits for; beyond it they count without a name


def _intervals() -> "deque[Interval]":
    return deque(maxlen=_MAX_INTERVALS)


@dataclass(slots=True)
class LaneCounters:
    """What went over one lane."""

    nbytes: int = 0
    operations: int = 0
    peak_depth: int = 0  # most transfers on their way at one time
    intervals: "deque[Interval]" = field(default_factory=_intervals)


@dataclass(slots=True)
class WaitCounters:
    """How often, and for how long, the computation waited for the same."""

    count: int = 0
    duration_ns: int = 0


def _lanes() -> dict[str, LaneCounters]:
    return {name: LaneCounters() for name in TRANSFERS}


@dataclass
class Counters:
    """The figures of one step so far."""

    started_ns: int = field(default_factory=time.perf_counter_ns)
    ended_ns: int = 0  # 0 while the step's block is open
    since_ns: int = 0  # when the step before it ended; 0: there is none
    saved_bytes: int = 0
    offloaded_bytes: int = 0
    offloaded_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    reloaded_bytes: int = 0
    deduplicated_bytes: int = 0
    evicted_bytes: int = 0  # of what left, what a plan meant to keep
    kept_bytes: "Counter[str]" = field(default_factory=Counter)
    hits: int = 0
    lates: int = 0
    misses: int = 0
    forwarded_bytes: int = 0
    cancelled_bytes: int = 0
    stall_ns: int = 0
    backpressure_ns: int = 0
    peak_device_bytes: int = 0
    peak_arena_bytes: int = 0
    peak_live_bytes: int = 0
    peak_disk_bytes: int = 0
    warnings: "Counter[str]" = field(default_factory=Counter)
    lanes: dict[str, LaneCounters] = field(default_factory=_lanes)
    # When the computation did not run for our sake: it waited, or its thread made a copy.
    waits: "deque[Interval]" = field(default_factory=_intervals)
    waited_for: dict[tuple[str, Subject], WaitCounters] = field(default_factory=dict)

    @property
    def transfers(self) -> list[Interval]:
        """When anything was on its way on any lane: disjoint and sorted."""
        return merged(chain.from_iterable(lane.intervals for lane in self.lanes.values()))

    @property
    def only_waits(self) -> list[Interval]:
        """Of ``waits``, without the copies that the thread has made: those are work."""
        copies = set(self.lanes["offload"].intervals)
        return [wait for wait in self.waits if wait not in copies]

    def wait(self, kind: str, start_ns: int, end_ns: int, about: Subject) -> None:
        """Count a wait; ``kind`` is ``"stall"`` or ``"backpressure"``."""
        duration_ns = end_ns - start_ns
        if kind == "stall":
            self.stall_ns += duration_ns
        else:
            self.backpressure_ns += duration_ns
        self.waits.append((start_ns, end_ns))
        key = kind, about._replace(block=-1)
        if key not in self.waited_for and len(self.waited_for) >= _MAX_WAITED_FOR:
            key = kind, Subject()
        figures = self.waited_for.setdefault(key, WaitCounters())
        figures.count += 1
        figures.duration_ns += duration_ns
