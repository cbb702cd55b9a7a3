"""Order: the events and waits that order streams, and a checker that finds a missing one.

Everything that a lane does to order copies goes through an ``Order``. The plain one is torch's
streams and events and nothing else. ``CheckedOrder`` (``OFFLOAD_CHECK=1``) also keeps a vector
clock for every stream and for the host, and knows who read and wrote which memory last. Two
accesses to the same bytes, one of them a write, must be ordered by events; where they are not, the
program is wrong even if it happened to give the right result this time.

The clocks are kept when work is queued, in the order of the program. What is found therefore does
not depend on when the device does what. The method: L. Lamport, "Time, Clocks, and the Ordering of
Events in a Distributed System" (1978), with vectors as in C. Fidge (1988).
"""

import os
from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from offload.errors import OrderError

HOST = "host"
VectorClock = dict[Hashable, int]  # how far each actor had come
Actor = torch.Stream | str  # a stream, or HOST


class Mark:
    """A point in a stream's work that others can wait for."""

    __slots__ = ("clock", "event")

    def __init__(self, event: torch.Event) -> None:
        self.event = event
        self.clock: VectorClock = {}


class Order:
    """Events and waits."""

    def record(self, stream: torch.Stream, *, timed: bool = False) -> Mark:
        """The point that ``stream`` has come to now; ``timed``: and when that was."""
        if not timed:
            return Mark(stream.record_event())
        return Mark(stream.record_event(torch.Event(stream.device, enable_timing=True)))

    def wait(self, stream: torch.Stream, mark: Mark) -> None:
        """What is queued to ``stream`` from now on runs after ``mark``."""
        stream.wait_event(mark.event)

    def done(self, mark: Mark) -> bool:
        """Whether the device has passed ``mark``."""
        return mark.event.query()

    def synchronize(self, mark: Mark) -> None:
        """Let the host wait for ``mark``."""
        mark.event.synchronize()

    def touches(
        self, actor: Actor, start: int, nbytes: int, *, write: bool, what: str, space: str = HOST
    ) -> None:
        """``actor`` reads or writes ``nbytes`` bytes at address ``start`` of ``space`` (the host's
        memory, or a device's). ``what`` says so to people.
        """

    def hand_over(self, start: int, nbytes: int, space: str) -> None:
        """Leave it to torch's allocator to order what happens to these bytes from now on."""


def open_order() -> Order:
    """A checked one if the environment has ``OFFLOAD_CHECK=1``."""
    return CheckedOrder() if os.environ.get("OFFLOAD_CHECK", "0") not in ("", "0") else Order()


@dataclass
class _Access:
    actor: Hashable
    time: int
    what: str


@dataclass
class _Bytes:
    """The last accesses to one range of memory."""

    end: int
    written: _Access | None = None
    reads: dict[Hashable, _Access] = field(default_factory=dict)  # since then, by actor


class _Memory:
    """The ranges of one memory, split so that each access covers whole ranges."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: dict[int, _Bytes] = {}

    def cover(self, start: int, end: int) -> list[_Bytes]:
        """Ranges that make up ``[start, end)`` exactly; new ones where there were none."""
        self._split(start)
        self._split(end)
        covered, at = [], start
        while at < end:
            if at not in self._ranges:
                i = bisect_left(self._starts, at)
                until = min(end, self._starts[i]) if i < len(self._starts) else end
                insort(self._starts, at)
                self._ranges[at] = _Bytes(until)
            covered.append(self._ranges[at])
            at = self._ranges[at].end
        return covered

    def _split(self, at: int) -> None:
        i = bisect_left(self._starts, at) - 1
        if i < 0:
            return
        before = self._ranges[self._starts[i]]
        if before.end > at:
            insort(self._starts, at)
            self._ranges[at] = _Bytes(before.end, before.written, dict(before.reads))
            before.end = at


class CheckedOrder(Order):
    """The same, and a complaint about what the events do not order.

    Raises (from ``touches``):
        OrderError: an access is not ordered after an earlier one to the same bytes. It names both.
    """

    def __init__(self) -> None:
        self._clocks: dict[Hashable, VectorClock] = {}
        self._memories: dict[str, _Memory] = {}

    def record(self, stream: torch.Stream, *, timed: bool = False) -> Mark:
        mark = super().record(stream, timed=timed)
        self._launch(stream)
        mark.clock = dict(self._clock(stream))
        return mark

    def wait(self, stream: torch.Stream, mark: Mark) -> None:
        super().wait(stream, mark)
        _join(self._clock(stream), mark.clock)

    def done(self, mark: Mark) -> bool:
        passed = super().done(mark)
        if passed:
            _join(self._clock(HOST), mark.clock)
        return passed

    def synchronize(self, mark: Mark) -> None:
        super().synchronize(mark)
        _join(self._clock(HOST), mark.clock)

    def touches(
        self, actor: Actor, start: int, nbytes: int, *, write: bool, what: str, space: str = HOST
    ) -> None:
        clock = self._launch(actor)
        me = _name(actor)
        clock[me] = clock.get(me, 0) + 1
        now = _Access(me, clock[me], what)
        for held in self._memories.setdefault(space, _Memory()).cover(start, start + nbytes):
            earlier = [held.written, *held.reads.values()] if write else [held.written]
            for access in earlier:
                if access is not None and clock.get(access.actor, 0) < access.time:
                    raise OrderError(
                        f"{what} ({me}) is not ordered after {access.what} ({access.actor}): "
                        f"{nbytes} bytes at {start:#x} of {space} memory"
                    )
            if write:
                held.written, held.reads = now, {}
            else:
                held.reads[me] = now

    def hand_over(self, start: int, nbytes: int, space: str) -> None:
        for held in self._memories.setdefault(space, _Memory()).cover(start, start + nbytes):
            held.written, held.reads = None, {}

    def _clock(self, actor: Actor) -> VectorClock:
        return self._clocks.setdefault(_name(actor), {})

    def _launch(self, actor: Actor) -> VectorClock:
        """Whatever the host queues comes after what the host has seen."""
        clock = self._clock(actor)
        if actor != HOST:
            _join(clock, self._clock(HOST))
        return clock


def _join(clock: VectorClock, other: VectorClock) -> None:
    for actor, time in other.items():
        if clock.get(actor, 0) < time:
            clock[actor] = time


def _name(actor: Actor) -> Hashable:
    return actor if isinstance(actor, str) else f"stream {actor.stream_id} of {actor.device}"
