"""Trace: what happened and when, in a bounded ring. Always on: less than a microsecond an event.

The lanes of a trace are where time goes:

    offload, reload        between the device and host memory; on ``device="cpu"`` an offload is a
                           copy that the thread that trains makes, and a reload is no copy at all
    spill, fetch           between host memory and the disk
    stall, backpressure    the computation waits: for bytes to come back, for room to send them out

Beside them stand moments (``begin``, ``forward``, ``backward``, ``end`` of a step), the forwards of
modules that are watched (``module``), and samples of the memory in use. What an accelerator does is
timed by its own events, all else by the host's clock.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from offload.tensors.layout import TensorLayout

now_ns = time.perf_counter_ns
CAPACITY = 1 << 16
TRANSFERS = ("offload", "reload", "spill", "fetch")
WAITS = ("stall", "backpressure")
MOMENTS = ("begin", "forward", "backward", "end")


class Subject(NamedTuple):
    """What an event is about."""

    block: int = -1  # its id; -1 for none
    module: str = ""  # that saved it, where modules are watched
    operator: str = ""  # of backward, that asked for it
    tensor: TensorLayout | None = None


NOTHING = Subject()


class Event(NamedTuple):
    """One thing that happened, mostly to one block. ``start_ns == end_ns`` for a moment."""

    name: str
    block: int
    nbytes: int
    start_ns: int
    end_ns: int
    about: Subject | None = None


class Sample(NamedTuple):
    """Bytes in use at one time."""

    time_ns: int
    live_bytes: int  # of saved storages that are in the device's memory
    host_bytes: int  # of slots
    disk_bytes: int  # of extents


class Trace:
    """The newest events and samples, oldest first; older ones fall out."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        # Bare tuples, which are made in a fraction of the time: most are never looked at.
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=capacity)
        self._samples: deque[tuple[int, int, int, int]] = deque(maxlen=capacity)
        # For whoever adds many: the fields of an Event, and of a Sample, without a frame of Python.
        self.add = self._ring.append
        self.add_sample = self._samples.append

    def emit(
        self,
        name: str,
        block: int,
        nbytes: int,
        start_ns: int = 0,
        end_ns: int = 0,
        about: Subject | None = None,
    ) -> None:
        """Add an event; without times it is a moment, now."""
        if not end_ns:
            start_ns = end_ns = now_ns()
        self._ring.append((name, block, nbytes, start_ns, end_ns, about))

    def events(self) -> list[Event]:
        """A copy of what the ring holds."""
        return list(map(Event._make, self._ring))

    def samples(self) -> list[Sample]:
        """A copy of the samples that are held."""
        return list(map(Sample._make, self._samples))

    def clear(self) -> None:
        """Forget everything."""
        self._ring.clear()
        self._samples.clear()


_is_profiled = torch._C._autograd._profiler_enabled
_NO_RANGE: contextlib.AbstractContextManager[object] = contextlib.nullcontext()


P = ParamSpec("P")
T = TypeVar("T")


def in_range(name: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` returns, called within ``ranged(name)``: in a quarter of the time while no
    profiler is active.
    """
    if not _is_profiled():
        return work(*args, **kwargs)
    with record_function(name):
        return work(*args, **kwargs)


def ranged(name: str) -> contextlib.AbstractContextManager[object]:
    """A named range for ``torch.profiler``, and for Nsight under ``emit_nvtx``; next to nothing
    while no profiler is active.

    Example:
        >>> with torch.profiler.profile() as profiler, ranged("offload::reload"):
        ...     _ = torch.ones(3) + 1
        >>> "offload::reload" in {e.key for e in profiler.key_averages()}
        True
    """
    return record_function(name) if _is_profiled() else _NO_RANGE


Interval = tuple[int, int]  # [start_ns, end_ns)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint, sorted intervals.

    Example:
        >>> merged([(5, 9), (0, 2), (1, 3)])
        [(0, 3), (5, 9)]
    """
    out: list[Interval] = []
    first = last = 0  # of the newest, which may still grow
    for start, end in sorted(intervals):
        if out and start <= last:
            if end > last:  # max() takes twice as long
                last = end
                out[-1] = (first, last)
        elif end > start:
            first, last = start, end
            out.append((first, last))
    return out


def total_ns(intervals: Iterable[Interval]) -> int:
    """The length of disjoint intervals."""
    return sum(end - start for start, end in intervals)


def intersection_ns(a: list[Interval], b: list[Interval]) -> int:
    """How long both were going on; ``a`` and ``b`` are disjoint and sorted.

    Example:
        >>> intersection_ns([(0, 10)], [(2, 4), (8, 12)])
        4
    """
    i = j = both = 0
    while i < len(a) and j < len(b):
        a_start, a_end = a[i]
        b_start, b_end = b[j]
        start = a_start if a_start > b_start else b_start  # max() and min() take twice as long
        end = a_end if a_end < b_end else b_end
        if end > start:
            both += end - start
        if a_end < b_end:
            i += 1
        else:
            j += 1
    return both
