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
        leave after it; the room is M - K_i - S_i - w_b. Of S_i only that is meant which is there at
        one time: what comes back when it is asked for need not be all there.
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
from typing import NamedTuple

from offload.engines.budget import LEAST_MOVING

__all__ = ["TOLERANCE_BYTES", "UNLIMITED", "Chain", "Links", "Option", "Segment", "Shared"]

TOLERANCE_BYTES = 1e-6  # by which a room may be below 0: of rounding
UNLIMITED = 1e30  # a rate, in bytes a second, of what is never waited for


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
        beside_bytes: there while its forward runs, beside what stays and what waits to leave: a
            copy being made, for one.
        working_bytes: there while its backward runs, beside all that the segment saves.
        spared_bytes: of what the segment saves, what is never there together with the rest while
            its backward runs, as it comes back when it is asked for.
        forward_seconds: more than the segment's own.
        backward_seconds: more than the segment's own: the recomputation, for one.
        holds_output: keeps its own result, where it saves it.
        frees_input: lets its input go, unless the segment before holds it.
        limit_bytes: of a part, what the hooks send of all that the segment saves.
        whole: all that the segment saves is there when its backward begins, as where it was kept or
            computed again. Otherwise what left is there from when it is asked for.
        pieces: of ``offload_bytes``, in the order of the forward; (): may be divided at will.
        saves: of each storage that is saved while its forward runs, and is not small.
    """

    action: str
    resident_bytes: float = 0.0
    offload_bytes: float = 0.0
    present_bytes: float = 0.0
    host_bytes: float = 0.0
    disk_bytes: float = 0.0
    last_bytes: float | None = None
    beside_bytes: float = 0.0
    working_bytes: float = 0.0
    spared_bytes: float = 0.0
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    holds_output: bool = False
    frees_input: bool = False
    limit_bytes: float = 0.0
    whole: bool = True
    pieces: tuple[float, ...] = ()
    saves: tuple[int, ...] = ()

    @property
    def keeps_all(self) -> bool:
        """Whether all that the segment saves stays."""
        return self.holds_output and not self.offload_bytes

    @property
    def late_bytes(self) -> float:
        """What waits for the link when the forward has ended, however fast that is."""
        return self.offload_bytes if self.last_bytes is None else self.last_bytes

    @property
    def returning_bytes(self) -> float:
        """What its backward needs beside all that the segment saves; below 0 for less than that."""
        return self.working_bytes - self.spared_bytes


class Shared(NamedTuple):
    """Bytes that belong to an earlier segment as well."""

    back: int  # so many segments before
    nbytes: float


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
        shared: of ``saved_bytes``, what earlier segments save as well: if they hold it, it stays
            whatever this one does.
        lingering: what earlier segments save and this one only reads, or somebody else holds: there
            while its forward runs, also where they have let it go.
        is_gap: whether it is what lies between two.
        options: what may be chosen, at least one.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    saved_bytes: float
    options: tuple[Option, ...]
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    shared: tuple[Shared, ...] = ()
    lingering: tuple[Shared, ...] = ()
    is_gap: bool = False

    def need_bytes(self, option: Option, before: Sequence[Option] = ()) -> float:
        """The most that is there of it at one time under ``option``, where those ``before`` it were
        chosen; without those, where all of them let go.
        """
        return max(
            option.present_bytes + self.forward_bytes + self.lingering_bytes(before),
            self.saved_bytes + self.backward_bytes + option.returning_bytes,
        )

    def lingering_bytes(self, before: Sequence[Option] = ()) -> float:
        """Of ``lingering``, what the options chosen for the segments before do not keep anyway."""
        return sum(n for back, n in self.lingering if not (before and before[-back].keeps_all))


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
        prefetch_bytes: most bytes brought back early; like the window before, see ``widened``.
        in_flight: forwards that wait for their backward at one time, as in a pipeline. What each
            keeps is there all the while; its time is that of one forward and backward.
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
    in_flight: int = 1

    def options(self, choice: Sequence[int]) -> list[Option]:
        """The chosen option of each segment."""
        return [s.options[k] for s, k in zip(self.segments, choice, strict=True)]

    def widened(self, window_bytes: float) -> float:
        """What a window for bytes on their way really lets pass: large storages are let through by
        twos. One of no bytes lets nothing pass.
        """
        largest = max(max(o.pieces, default=0.0) for s in self.segments for o in s.options)
        return max(window_bytes, LEAST_MOVING * largest) if window_bytes else 0.0

    @property
    def compute_seconds(self) -> float:
        """Forward and backward of all segments, with nothing recomputed and nothing waited for."""
        return sum(s.forward_seconds + s.backward_seconds for s in self.segments)

    def floor(self) -> tuple[float, str]:
        """The least device memory for activations with which any plan can run, and the segment that
        sets it. No choice of options goes below; smaller segments would.
        """
        low, high, name = 0.0, self.in_flight * sum(map(_most, self.segments)), ""
        while high - low > 1e-9 * high:
            middle = (low + high) / 2
            choice = self.leanest(middle)
            if len(choice) == len(self.segments):
                high = middle
            else:
                low, name = middle, self.segments[len(choice)].name
        return self._needed(self.leanest(high)), name

    def _needed(self, choice: Sequence[int]) -> float:
        """The least device memory in which such a choice fits, as ``leanest`` counts."""
        options = self.options(choice)
        resident = (self.in_flight - 1) * self._least_resident
        most = 0.0
        for i, (s, o) in enumerate(zip(self.segments, options, strict=True)):
            most = max(most, resident + s.need_bytes(o, options[:i]))
            resident += o.resident_bytes
        return most

    @property
    def _least_resident(self) -> float:
        return sum(min(o.resident_bytes for o in s.options) for s in self.segments)

    def leanest(self, device_bytes: float) -> list[int]:
        """The options that leave the least behind of those that fit, up to the first segment that
        none fits for. To leave less is never worse for those that follow.
        """
        resident = (self.in_flight - 1) * self._least_resident
        choice: list[int] = []
        chosen: list[Option] = []
        for s in self.segments:
            room = device_bytes - resident
            fitting = [k for k, o in enumerate(s.options) if s.need_bytes(o, chosen) <= room]
            if not fitting:
                break
            choice.append(min(fitting, key=lambda k, s=s: s.options[k].resident_bytes))  # type: ignore[misc]
            chosen.append(s.options[choice[-1]])
            resident += chosen[-1].resident_bytes
        return choice


def _most(segment: Segment) -> float:
    return max(max(o.resident_bytes, segment.need_bytes(o)) for o in segment.options)
