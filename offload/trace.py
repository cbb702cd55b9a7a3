"""Trace: what happened and when, in a bounded ring. Always on: a microsecond an event."""

import time
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

now_ns = time.perf_counter_ns
CAPACITY = 1 << 16


class Event(NamedTuple):
    """One thing that happened to one block. ``start_ns == end_ns`` for a moment."""

    name: str
    block: int
    nbytes: int
    start_ns: int
    end_ns: int


class Trace:
    """The newest events, oldest first; older ones fall out."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._ring: deque[Event] = deque(maxlen=capacity)

    def emit(self, name: str, block: int, nbytes: int, start_ns: int = 0, end_ns: int = 0) -> None:
        """Add an event; without times it is a moment, now."""
        if not end_ns:
            start_ns = end_ns = now_ns()
        self._ring.append(Event(name, block, nbytes, start_ns, end_ns))

    def events(self) -> list[Event]:
        """A copy of what the ring holds."""
        return list(self._ring)


Interval = tuple[int, int]  # [start_ns, end_ns)


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as disjoint, sorted intervals.

    Example:
        >>> merged([(5, 9), (0, 2), (1, 3)])
        [(0, 3), (5, 9)]
    """
    out: list[Interval] = []
    for start, end in sorted(intervals):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        elif end > start:
            out.append((start, end))
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
        both += max(0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both
