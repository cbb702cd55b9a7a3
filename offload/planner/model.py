"""What a plan costs: time and memory of a step, from what its segments were measured to need.

A model is a chain of segments ``1..L``. Forward runs them in order, backward in reverse. Of each
segment are known the seconds ``f, b`` of its forward and backward, the bytes ``S`` that it saves,
and the bytes ``w_f, w_b`` that it needs beside them only while it runs. For each a plan chooses an
``Option``: bytes that stay (``r``), bytes that leave and come back (``o``), bytes there when its
forward has run (``g``), bytes at rest in host memory and on the disk (``h, n``), seconds more in
forward and backward.

[Note: the recurrence] Bytes leave in the order they were made and come back in the opposite one,
both directions at once. With ``K_i`` the bytes that stay of all segments before ``i``, ``G_i`` what
rests in host memory up to ``i``, ``M, H`` the budgets, ``v`` the rates out and back of the link and
of the disk behind it, and ``Q, W`` the bytes that wait for either:

    forward, i = 1..L
        stall = max(0, (Q - (M - K_i - g_i - w_f)) / v_out, (W - (H - G_i - n_i)) / v_write)
        Q, W fall by what passes in the stall and in the forward, and grow by o_i and n_i, which
        leave while they are made: Q >= l_i is left, of which the forward's last act made l_i
    backward: the same, mirrored. Read in reverse, what has to come back before B_i is what would
        leave after it; the room is M - K_i - S_i - w_b.
    what still waits when forward ends occupies memory until it has left: i = L..1
        R falls by o_i, as what backward wants at once need not leave; a stall while R > the room

A plan cannot be run if a room is below 0. The sum of all is the step. A queue can only hurt, so the
maxima need no binary variables in the exact problem (``exact.py``).

The two-tier case, with one direction at a time and nothing recomputed, is that of Beaumont,
Eyraud-Dubois, Shilova: Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training,
2020, who show that it is strongly NP-hard. Rates are those measured while the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Chain", "Links", "Option", "Prediction", "Segment", "predict"]

UNLIMITED = 1e30  # a rate, in bytes a second, of what is never waited for
_TOLERANCE_BYTES = 1e-6


@dataclass(frozen=True)
class Links:
    """Bytes a second between the tiers; ``None`` where there is no such way, or it is not known.

    Args:
        link_out: device to host memory.
        link_in: host memory to device.
        disk_write: host memory to disk.
        disk_read: disk to host memory.
    """

    link_out: float | None = None
    link_in: float | None = None
    disk_write: float | None = None
    disk_read: float | None = None


@dataclass(frozen=True)
class Option:
    """What may become of a segment's activations. Bytes and seconds; see the module's text.

    Args:
        action: as a rule names it, ``"recompute+disk"``.
        resident_bytes: stay on the device.
        offload_bytes: leave, and come back.
        present_bytes: are there when the segment's forward has run.
        host_bytes: come to rest in host memory.
        disk_bytes: come to rest on the disk.
        last_bytes: of ``offload_bytes``, what is made at the very end of the forward and cannot
            have left by then; ``None``: all.
        burst_bytes: there twice for a moment, while it is copied.
        working_bytes: there while its backward runs, beside all that the segment saves.
        forward_seconds: more than the segment's own.
        backward_seconds: more than the segment's own: the recomputation, for one.
        holds_output: keeps its own result, where it saves it.
        frees_input: lets its input go, unless the segment before holds it.
    """

    action: str
    resident_bytes: float = 0.0
    offload_bytes: float = 0.0
    present_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    last_bytes: float | None = None
    burst_bytes: float = 0.0
    working_bytes: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    holds_output: bool = False
    frees_input: bool = False

    @property
    def late_bytes(self) -> float:
        """What waits for the link when the forward has ended, however fast that is."""
        return self.offload_bytes if self.last_bytes is None else self.last_bytes


@dataclass(frozen=True)
class Segment:
    """One link of the chain, as measured.

    Args:
        name: of the module, or a description of what lies between two.
        forward_seconds: without saving anything.
        backward_seconds: without recomputing anything.
        saved_bytes: of all storages that it saves and nobody after it.
        forward_bytes: needed beside them while its forward runs.
        backward_bytes: the same while its backward runs.
        shared_bytes: of ``saved_bytes``, what the segment before saves as well.
        options: what may be chosen, at least one.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: float
    options: tuple[Option, ...]
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    shared_bytes: float = 0.0


@dataclass(frozen=True)
class Chain:
    """Segments, the memory that a step may take, and the rates between the tiers.

    Args:
        segments: in the order of the forward.
        device_bytes: for activations: the budget less what is there in any case.
        out_rate: bytes a second from the device to the next tier.
        back_rate: bytes a second to the device.
        host_bytes: of host memory, for what rests there and what passes through to the disk.
        disk_bytes: of the disk.
        write_rate: bytes a second from host memory to the disk behind it.
        read_rate: bytes a second from there.
        window_bytes: most bytes on their way out.
        prefetch_bytes: most bytes brought back early.
    """

    segments: tuple[Segment, ...]
    device_bytes: float
    out_rate: float = UNLIMITED
    back_rate: float = UNLIMITED
    host_bytes: float = math.inf
    disk_bytes: float = math.inf
    write_rate: float = UNLIMITED
    read_rate: float = UNLIMITED
    window_bytes: float = math.inf
    prefetch_bytes: float = math.inf

    def options(self, choice: Sequence[int]) -> list[Option]:
        """The chosen option of each segment."""
        return [s.options[k] for s, k in zip(self.segments, choice, strict=True)]

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of all segments, with nothing recomputed and nothing waited for."""
        return sum(s.forward_seconds + s.backward_seconds for s in self.segments)

    def floor(self) -> tuple[float, str]:
        """The least device memory for activations with which any plan can run, and the segment that
        sets it. No choice of options goes below; smaller segments would.
        """
        least = [min(s.options, key=lambda o: o.resident_bytes) for s in self.segments]
        resident, floor, name = 0.0, 0.0, ""
        for s, o in zip(self.segments, least, strict=True):
            present = min(p.present_bytes for p in s.options)
            need = max(present + s.forward_bytes, s.saved_bytes + s.backward_bytes)
            if resident + need > floor:
                floor, name = resident + need, s.name
            resident += o.resident_bytes
        return floor, name


@dataclass(frozen=True)
class Prediction:
    """What the model says of a plan. ``seconds`` is infinite where it cannot be run.

    Attributes:
        seconds: of a forward and backward, stalls included.
        forward_stalls: seconds that the forward of each segment waits for room.
        backward_stalls: seconds that the backward of each segment waits for bytes, or for room.
        peak_device_bytes: most of what the chain holds on the device.
        peak_host_bytes: most of what rests in host memory or passes through.
        offloaded_bytes: that leave the device.
        disk_bytes: written, and read again.
    """

    seconds: float
    forward_stalls: tuple[float, ...] = ()
    backward_stalls: tuple[float, ...] = ()
    peak_device_bytes: float = 0.0
    peak_host_bytes: float = 0.0
    offloaded_bytes: float = 0.0
    disk_bytes: float = 0.0

    @property
    def feasible(self) -> bool:
        """Whether the plan can be run within the budgets."""
        return math.isfinite(self.seconds)

    @property
    def stall_seconds(self) -> float:
        """All that is waited for."""
        return sum(self.forward_stalls) + sum(self.backward_stalls)


NOT_FEASIBLE = Prediction(math.inf)


class Walk:
    """A chosen plan laid out along the chain: what stays before each segment, and the rooms."""

    def __init__(self, chain: Chain, choice: Sequence[int]) -> None:
        self.chain = chain
        self.options = chain.options(choice)
        self.resident = [0.0]  # K
        self.resting = [0.0]  # G
        self.off_before = [0.0]
        for i, o in enumerate(self.options):
            self.resident.append(self.resident[-1] + o.resident_bytes + self._held_over(i))
            self.resting.append(self.resting[-1] + o.host_bytes)
            self.off_before.append(self.off_before[-1] + o.offload_bytes)
        budget, segments = chain.device_bytes, chain.segments
        self.forward_rooms = [
            budget - self.resident[i] - o.present_bytes - s.forward_bytes
            for i, (s, o) in enumerate(zip(segments, self.options, strict=True))
        ]
        self.backward_rooms = [
            budget - self.resident[i] - s.saved_bytes - s.backward_bytes - o.working_bytes
            for i, (s, o) in enumerate(zip(segments, self.options, strict=True))
        ]
        self.host_rooms = [
            chain.host_bytes - self.resting[i + 1] - o.disk_bytes
            for i, o in enumerate(self.options)
        ]

    def _held_over(self, i: int) -> float:
        """The result of segment ``i``, where it holds what the next one means to let go."""
        if i + 1 == len(self.options):
            return 0.0
        held = self.options[i].holds_output and self.options[i + 1].frees_input
        return self.chain.segments[i + 1].shared_bytes if held else 0.0

    @property
    def feasible(self) -> bool:
        """Whether no room is below 0."""
        rooms = min((*self.forward_rooms, *self.backward_rooms, *self.host_rooms), default=0.0)
        disk_bytes = sum(o.disk_bytes for o in self.options)
        return rooms >= -_TOLERANCE_BYTES and disk_bytes <= self.chain.disk_bytes


def predict(chain: Chain, choice: Sequence[int]) -> Prediction:
    """Time and memory of a plan, see Note: the recurrence.

    Args:
        chain: the segments and the budgets.
        choice: for each segment the number of its option.

    Example:
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
        return NOT_FEASIBLE
    forward, queue, peak_forward, peak_host = _forward(walk)
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
        peak_host_bytes=peak_host,
        offloaded_bytes=walk.off_before[-1],
        disk_bytes=sum(o.disk_bytes for o in walk.options),
    )


def _forward(walk: Walk) -> tuple[list[float], float, float, float]:
    """Stalls, what waits in the end, and the peaks of device and host memory."""
    chain, queue, writes, peak, host = walk.chain, 0.0, 0.0, 0.0, 0.0
    stalls = []
    for i, (s, o) in enumerate(zip(chain.segments, walk.options, strict=True)):
        room = min(walk.forward_rooms[i], chain.window_bytes)
        stall = max(
            0.0, (queue - room) / chain.out_rate, (writes - walk.host_rooms[i]) / chain.write_rate
        )
        queue = max(0.0, queue - chain.out_rate * stall)
        writes = max(0.0, writes - chain.write_rate * stall)
        host = max(host, writes + walk.resting[i + 1] + o.disk_bytes)
        seconds = s.forward_seconds + o.forward_seconds
        before, queue = queue, _after(queue, o, chain.out_rate * seconds)
        there = walk.resident[i] + max(0.0, o.present_bytes - o.offload_bytes)
        peak = max(peak, there + max(before, queue) + o.burst_bytes + s.forward_bytes)
        writes = max(0.0, writes - chain.write_rate * seconds) + o.disk_bytes
        stalls.append(stall)
    return stalls, queue, peak, host


def _after(queue: float, option: Option, passed: float) -> float:
    """What waits when a segment has run, and ``passed`` bytes could have left meanwhile."""
    return max(queue + option.offload_bytes - passed, option.late_bytes)


def _backward(walk: Walk) -> list[float]:
    """Stalls, by the mirrored recurrence."""
    chain, queue, reads = walk.chain, 0.0, 0.0
    stalls = []
    for i, (s, o) in enumerate(zip(chain.segments, walk.options, strict=True)):
        room = min(walk.backward_rooms[i], chain.prefetch_bytes)
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
        if queue > walk.backward_rooms[i] + _TOLERANCE_BYTES:
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
    return [max(0.0, min(room, walk.chain.prefetch_bytes)) for room in walk.backward_rooms]


def _peak_of_backward(walk: Walk, queue: float) -> float:
    """The most that is on the device while backward runs and brings back as much as it may.

    A segment's own bytes go one by one while its backward runs, and early ones take their place: it
    is at its fullest when it begins, or when it ends.
    """
    chain, allowed = walk.chain, caps(walk)
    last = len(chain.segments) - 1
    peak, early = 0.0, max(0.0, queue - walk.options[last].offload_bytes)  # has not left yet
    for i in reversed(range(last + 1)):
        s, o = chain.segments[i], walk.options[i]
        room, seconds = max(0.0, walk.backward_rooms[i]), s.backward_seconds + o.backward_seconds
        early = min(early, room)
        stays = walk.resident[i] + s.backward_bytes + o.working_bytes
        peak = max(peak, stays + s.saved_bytes + early)
        fetched = min(early + chain.back_rate * seconds, allowed[i], walk.off_before[i])
        early = max(early, fetched)
        peak = max(peak, stays + early)
        if i:
            early = max(0.0, early - walk.options[i - 1].offload_bytes)
    return peak
