"""The time and the memory of a plan, by the recurrence of ``model.py``."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from offload.engines.budget import LEAST_MOVING, has_room
from offload.planner.model import TOLERANCE_BYTES, Chain, Option

__all__ = ["Prediction", "Walk", "caps", "predict"]

_PIECES = 16  # of what may be divided at will


@dataclass(frozen=True)
class Prediction:
    """What the model says of a plan. ``seconds`` is infinite where it cannot be run.

    Attributes:
        seconds: of a forward and backward, stalls included.
        forward_stalls: seconds that the forward of each segment waits for room.
        backward_stalls: seconds that the backward of each segment waits for bytes, or for room.
        peak_device_bytes: most of what the chain holds on the device.
        offloaded_bytes: that leave the device.
        disk_bytes: written, and read again.
    """

    seconds: float
    forward_stalls: tuple[float, ...] = ()
    backward_stalls: tuple[float, ...] = ()
    peak_device_bytes: float = 0.0
    offloaded_bytes: float = 0.0
    disk_bytes: float = 0.0


class Walk:
    """A chosen plan laid out along the chain: what stays before each segment, and the rooms."""

    def __init__(self, chain: Chain, choice: Sequence[int]) -> None:
        self.chain = chain
        self.options = chain.options(choice)
        self.resident = [0.0]  # K
        resting = [0.0]  # G
        held = self._held()
        for o, held_bytes in zip(self.options, held, strict=True):
            self.resident.append(self.resident[-1] + o.resident_bytes + held_bytes)
            resting.append(resting[-1] + o.host_bytes)
        others = chain.in_flight - 1
        self.resident = [others * self.resident[-1] + n for n in self.resident]
        budget, segments = chain.device_bytes, chain.segments
        self.forward_rooms = [
            budget - self.resident[i] - o.present_bytes - s.forward_bytes - self.lingering_bytes(i)
            for i, (s, o) in enumerate(zip(segments, self.options, strict=True))
        ]
        self.backward_rooms = [
            budget - self.resident[i] - s.saved_bytes - s.backward_bytes - o.returning_bytes
            for i, (s, o) in enumerate(zip(segments, self.options, strict=True))
        ]
        self.host_rooms = [
            chain.host_bytes - others * resting[-1] - resting[i + 1] - o.disk_bytes
            for i, o in enumerate(self.options)
        ]

    def _held(self) -> list[float]:
        """Of each segment, what it holds while a later one means to let it go."""
        held = [0.0] * len(self.options)
        for i, s in enumerate(self.chain.segments):
            for back, nbytes in s.shared:
                if self.options[i - back].holds_output and self.options[i].frees_input:
                    held[i - back] += nbytes
        return held

    def lingering_bytes(self, i: int) -> float:
        """What is there while the forward of segment ``i`` runs, though it was let go."""
        return self.chain.segments[i].lingering_bytes(self.options[:i])

    @property
    def feasible(self) -> bool:
        """Whether no room is below 0."""
        rooms = min((*self.forward_rooms, *self.backward_rooms, *self.host_rooms), default=0.0)
        disk_bytes = sum(o.disk_bytes for o in self.options)
        disk_bytes *= self.chain.in_flight
        return rooms >= -TOLERANCE_BYTES and disk_bytes <= self.chain.disk_bytes


def predict(chain: Chain, choice: Sequence[int]) -> Prediction:
    """Time and memory of a plan, see Note: the recurrence.

    Args:
        chain: the segments and the budgets.
        choice: for each segment the number of its option.

    Example:
        >>> from offload.planner.model import Segment
        >>> keep = Option("keep", resident_bytes=8, present_bytes=8)
        >>> away = Option("host", offload_bytes=8, present_bytes=8)
        >>> layers = tuple(Segment(str(i), 1.0, 2.0, 8, (keep, away)) for i in range(3))
        >>> predict(Chain(layers, device_bytes=16, out_rate=8, back_rate=8), (0, 0, 0)).seconds
        inf
        >>> predict(Chain(layers, device_bytes=16, out_rate=8, back_rate=8), (1, 1, 0)).seconds
        9.0
        >>> predict(Chain(layers, device_bytes=16, out_rate=4, back_rate=8), (1, 1, 0)).seconds
        10.0
    """
    walk = Walk(chain, choice)
    if not walk.feasible:
        return Prediction(math.inf)
    forward, queue, peak_forward = _forward(walk)
    backward = _backward(walk)
    leftover = _leftover(walk, queue, backward)
    stalls = tuple(b + r for b, r in zip(backward, leftover, strict=True))
    extra = sum(o.forward_seconds + o.backward_seconds for o in walk.options)
    return Prediction(
        seconds=chain.compute_seconds + extra + sum(forward) + sum(stalls),
        forward_stalls=tuple(forward),
        backward_stalls=stalls,
        # What would pass the budget for a moment waits at its gate.
        peak_device_bytes=min(
            max(peak_forward, _peak_of_backward(walk, queue)), chain.device_bytes
        ),
        offloaded_bytes=sum(o.offload_bytes for o in walk.options),
        disk_bytes=sum(o.disk_bytes for o in walk.options),
    )


def _forward(walk: Walk) -> tuple[list[float], float, float]:
    """Stalls, what waits in the end, and the peak of device memory."""
    chain, queue, writes, peak = walk.chain, 0.0, 0.0, 0.0
    window_bytes = chain.widened(chain.window_bytes)
    stalls = []
    for i, (s, o) in enumerate(zip(chain.segments, walk.options, strict=True)):
        room = min(walk.forward_rooms[i], window_bytes)
        stall = max(
            0.0, (queue - room) / chain.out_rate, (writes - walk.host_rooms[i]) / chain.write_rate
        )
        queue = max(0.0, queue - chain.out_rate * stall)
        writes = max(0.0, writes - chain.write_rate * stall)
        seconds = s.forward_seconds + o.forward_seconds
        before, queue = queue, _after(queue, o, chain.out_rate * seconds)
        # What it saves appears while the queue that it has found passes: one of both ends.
        grown = max(before, o.resident_bytes + o.beside_bytes + queue)
        peak = max(peak, walk.resident[i] + grown + s.forward_bytes + walk.lingering_bytes(i))
        writes = max(0.0, writes - chain.write_rate * seconds) + o.disk_bytes
        stalls.append(stall)
    return stalls, queue, peak


def _after(queue: float, option: Option, passed: float) -> float:
    """What waits when a segment has run, and ``passed`` bytes could have left meanwhile."""
    return max(queue + option.offload_bytes - passed, option.late_bytes)


def _backward(walk: Walk) -> list[float]:
    """Stalls, by the mirrored recurrence."""
    chain, queue, reads = walk.chain, 0.0, 0.0
    window_bytes = chain.widened(chain.prefetch_bytes)
    stalls = []
    for i, (s, o) in enumerate(zip(chain.segments, walk.options, strict=True)):
        room = min(walk.backward_rooms[i], window_bytes)
        stall = max(
            0.0, (queue - room) / chain.back_rate, (reads - walk.host_rooms[i]) / chain.read_rate
        )
        seconds = s.backward_seconds + o.backward_seconds + stall
        queue = _after(queue, o, chain.back_rate * seconds)
        reads = max(0.0, reads - chain.read_rate * seconds) + o.disk_bytes
        stalls.append(stall)
    return stalls


def _leftover(walk: Walk, queue: float, backward: Sequence[float]) -> list[float]:
    """Stalls while what still waits when forward ends is in the way of backward."""
    chain = walk.chain
    stalls = [0.0] * len(chain.segments)
    for i in reversed(range(len(chain.segments))):
        s, o = chain.segments[i], walk.options[i]
        queue = max(0.0, queue - o.offload_bytes)
        if queue > walk.backward_rooms[i] + TOLERANCE_BYTES:
            stalls[i] = (queue - walk.backward_rooms[i]) / chain.out_rate
            queue = walk.backward_rooms[i]
        seconds = s.backward_seconds + o.backward_seconds + backward[i]
        queue = max(0.0, queue - chain.out_rate * seconds)
    return stalls


def caps(walk: Walk) -> list[float]:
    """For each segment, what may be there early of the segments before it while its backward runs.

    What is brought back for a segment stays through the backward of all in between, and none of
    those may lack room: the reserve rule.
    """
    rooms = walk.backward_rooms
    if walk.chain.in_flight > 1:  # a forward may come next
        rooms = [min(pair) for pair in zip(rooms, walk.forward_rooms, strict=True)]
    return [max(0.0, room) for room in rooms]


class _Ahead:
    """What is brought back before backward asks for it, piece by piece, as far as the reserve rule
    allows. Its memory counts from the moment it is asked for, so that rates make no difference.
    """

    def __init__(self, walk: Walk) -> None:
        self._rooms = caps(walk)
        self._limit = walk.chain.prefetch_bytes
        self._early = [0.0] * len(walk.options)  # bytes of each segment
        self._upcoming = deque(
            (i, n) for i in reversed(range(len(walk.options))) for n in asks(walk.options[i])
        )
        # What was asked for last, or saved last, which leaves less for what comes early.
        self._at_hand = self._upcoming[0][1] if self._upcoming else 0.0

    @property
    def nbytes(self) -> float:
        """Of all that came early and was not asked for yet."""
        return sum(self._early)

    def fill(self, at: int, room: float) -> None:
        """While backward of segment ``at`` runs, bring back what there is room for: ``room`` for
        all that is early, its own as well.
        """
        while self._upcoming:
            i, n = self._upcoming[0]
            there = self.nbytes
            limit = self._limit - self._at_hand
            is_free = self._limit and has_room(there, n, limit, LEAST_MOVING)
            if not is_free or there + n > room:
                return
            if any(sum(self._early[:k]) + n > self._rooms[k] for k in range(i + 1, at)):
                return
            self._early[i] += n
            self._upcoming.popleft()

    def ask(self, i: int, nbytes: float) -> None:
        """Backward wants the next of segment ``i``."""
        self._at_hand = nbytes
        if self._early[i] > 0:
            self._early[i] = max(0.0, self._early[i] - nbytes)
        else:
            self._upcoming.popleft()


def asks(option: Option) -> list[float]:
    """What leaves, piece by piece, in the order in which backward wants it."""
    if option.pieces or not option.offload_bytes:
        return list(reversed(option.pieces))
    return [option.offload_bytes / _PIECES] * _PIECES


def _peak_of_backward(walk: Walk, queue: float) -> float:
    """The most that is on the device while backward runs and brings back as much as it may."""
    chain, ahead, peak = walk.chain, _Ahead(walk), 0.0
    left = queue  # what has not left when forward ends
    for i in reversed(range(len(chain.segments))):
        s, o = chain.segments[i], walk.options[i]
        stays = walk.resident[i] + s.backward_bytes + o.working_bytes
        left = max(0.0, left - o.offload_bytes)
        there = s.saved_bytes if o.whole else s.saved_bytes - o.offload_bytes  # wanted first
        if not s.is_gap:  # between segments nothing is brought back
            ahead.fill(i, chain.device_bytes - stays - there)
        peak = max(peak, stays + there + max(left, ahead.nbytes))
        for n in asks(o):
            ahead.ask(i, n)
            there = s.saved_bytes if o.whole else n
            ahead.fill(i, chain.device_bytes - stays - there)
            peak = max(peak, stays + there + max(left, ahead.nbytes))
        left = max(0.0, left - chain.out_rate * (s.backward_seconds + o.backward_seconds))
    return peak
