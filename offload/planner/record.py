"""What one forward and backward of a planned model did, as it is written down while it runs."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offload.report.trace import Interval, intersection_ns, merged
from offload.tiers.gate import Need

__all__ = [
    "Assignment", "Clock", "DeviceClock", "Gap", "HostClock", "Measured", "Pass", "StorageIds",
    "Visit", "signature_of",
]  # fmt: skip


class Clock(Protocol):
    """Tells when the computation reached a point."""

    def stamp(self) -> Any:
        """Now, in the computation."""

    def seconds(self, start: Any, end: Any, waits: list[Interval]) -> float:
        """Between two stamps, without ``waits`` where those are of the same clock."""


class HostClock:
    """Where the computation is the host's."""

    def stamp(self) -> int:
        return time.perf_counter_ns()

    def seconds(self, start: int, end: int, waits: list[Interval]) -> float:
        span_ns = end - start - intersection_ns([(start, end)], waits)
        return max(0, span_ns) / 1e9


class DeviceClock:
    """Events on the current stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def stamp(self) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, start: torch.Event, end: torch.Event, waits: list[Interval]) -> float:
        end.synchronize()
        return max(0.0, float(start.elapsed_time(end))) / 1e3


class StorageIds:
    """A number for each storage, never given twice: an address is used again after a death."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._count = 0

    def living(self) -> set[int]:
        """The numbers of those that are alive."""
        return {number for known, number in self._known.values() if known() is not None}

    def of(self, storage: torch.UntypedStorage) -> int:
        """The number of ``storage``."""
        known = self._known.get(storage._cdata)
        if known is not None and known[0]() is not None:
            return known[1]
        self._count += 1
        self._known[storage._cdata] = (weakref.ref(storage), self._count)
        return self._count


@dataclass(frozen=True)
class Assignment:
    """What a forward does with its segments.

    Attributes:
        actions: by key; as options name them, ``"disk:50%"`` for a part.
        limits: by key, the bytes of such a part.
        gap_actions: of what is saved outside of segments, by the number of those before it.
        gap_default: of what is not named there.
        default: the action of a segment with another key.
        needs: of everything between and in the segments: entry ``2 i + 1`` is visit ``i``.
        limit_bytes: the budget of device memory; ``None``: the session's.
        spare_bytes: what may be there when the forward begins; ``None``: it is not known.
        record: whether to write down bytes as well as times.
        select: also what of a region that is recomputed a selective one would hold; takes time.
        watch_peak: whether to measure the most memory that an accelerator's allocator gives out;
            starts its peak anew, as ``record`` does.
    """

    actions: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, int] = field(default_factory=dict)
    gap_actions: Mapping[int, str] = field(default_factory=dict)
    gap_default: str = "keep"
    default: str = "keep"
    needs: Sequence[Need] = ()
    limit_bytes: int | None = None
    spare_bytes: int | None = None
    record: bool = False
    select: bool = False
    watch_peak: bool = False


@dataclass
class Gap:
    """What lies between two segments, before the first or after the last. Bytes by storage.

    Attributes:
        saved: what is saved there.
        held: what the caller holds, who has passed it to the model, by where it is saved first. It
            counts from there on, and stays.
        lingering: what segments before save to compute it again, and somebody else still held when
            something was saved there; on the cpu.
    """

    saved: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    lingering: dict[int, int] = field(default_factory=dict)


@dataclass
class Visit:
    """One call of a segment's forward, and its backward.

    Attributes:
        key: the segment's name, with ``#2`` and so on for further calls in one forward.
        number: among the visits of the pass; -1: it takes no part in the backward, or none as
            planned.
        action: what was done with its activations.
        entered, left, began: stamps of its forward, and of the beginning of its backward.
        backward: the number of that backward, as autograd counts them.
        recomputed: stamps around each recomputation.
        saved: bytes of each storage that its forward saves, by number.
        held: bytes of each storage that is handed over to be held: what the action leaves of them.
        selected: the same of the results that a selective region would hold, where that was looked
            at.
        collected: of ``selected``, what somebody still held when the segment after next ran.
        spans: the first and the last operation that saves each of ``saved``, by their numbers.
        before: the gap between the segment before and this one.
        lingering: bytes of each storage that others save to compute it again, and somebody else
            still held when its forward began; on the cpu.
        lingering_back: the same when its backward began.
        passing_bytes: most of it that was in memory at one time while its forward ran and what it
            saved left, without what was on its way out; of an accelerator, ``forward_peak_bytes``
            is looked at.
        forward_peak_bytes, backward_peak_bytes: most of the allocator above the beginning.
    """

    key: str
    number: int
    action: str
    entered: Any = None
    left: Any = None
    began: Any = None
    backward: int = -1
    recomputed: list[tuple[Any, Any]] = field(default_factory=list)
    saved: dict[int, int] = field(default_factory=dict)
    held: dict[int, int] = field(default_factory=dict)
    selected: dict[int, int] = field(default_factory=dict)
    collected: set[int] = field(default_factory=set)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    before: Gap = field(default_factory=Gap)
    lingering: dict[int, int] = field(default_factory=dict)
    lingering_back: dict[int, int] = field(default_factory=dict)
    passing_bytes: int = 0
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0
    start_bytes: int = 0  # in use when either began
    gradient_bytes: int = 0  # of parameters, that this backward makes

    def note_saved(self, number: int, nbytes: int, operation: int) -> None:
        """The operation with this number saves a storage."""
        self.saved.setdefault(number, nbytes)
        first, _ = self.spans.get(number, (operation, operation))
        self.spans[number] = (first, operation)


@dataclass
class Pass:
    """A forward of the model and its backward.

    Attributes:
        signature: of the forward's inputs.
        clock: of its stamps.
        started, ended: stamps.
        first: what blocks of its visits are numbered from, as entries of a plan.
        assignment: what it goes by.
        crowded: whether more was alive when it began than the assignment knows of.
        misjudged: whether a segment that is not among the visits took part in the backward.
        in_flight: forwards, with this one, whose graphs were waiting when its backward began.
        pauses: stamps around what other forwards and their backwards took meanwhile.
    """

    signature: str
    clock: Clock
    started: Any
    first: int = 0
    assignment: Assignment = field(default_factory=Assignment)
    crowded: bool = False
    misjudged: bool = False
    in_flight: int = 1
    pauses: list[tuple[Any, Any]] = field(default_factory=list)
    input_bytes: int = 0
    ended: Any = None
    visits: list[Visit] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)  # by segment, that have begun
    start_bytes: int = 0  # of the allocator
    peak_bytes: int = 0  # most of the allocator, where that was watched
    gradient_bytes: int = 0  # of all parameters, that this backward makes
    # Of what other passes have saved, what is in other hands when forward and backward begin.
    leftover: dict[int, int] = field(default_factory=dict)
    leftover_back: dict[int, int] = field(default_factory=dict)
    after: Gap = field(default_factory=Gap)  # after the last segment so far
    waits: list[Interval] = field(default_factory=list)
    open: Visit | None = None
    in_backward: bool = False

    @property
    def held(self) -> dict[int, int]:
        """Bytes of each storage that was saved so far, and is the caller's."""
        found = dict(self.after.held)
        for v in self.visits:
            found |= v.before.held
        return found

    @property
    def saved(self) -> dict[int, int]:
        """Bytes of each other storage that was saved so far, also to compute it again."""
        found = dict(self.after.saved)
        for v in self.visits:
            found |= v.before.saved | v.saved | v.held
        return found

    @property
    def complete(self) -> bool:
        """Whether all of the backward was seen."""
        return (
            bool(self.visits)
            and not self.misjudged
            and self.ended is not None
            and all(v.began is not None and v.left is not None for v in self.visits)
        )

    @property
    def all_recomputed(self) -> bool:
        """Whether each segment was computed again."""
        return all(v.action.startswith("recompute") for v in self.visits)

    def times(self) -> list[tuple[float, float, float, float]]:
        """For each visit: seconds before it, of its forward, backward and recomputation."""
        clock, waits = self.clock, merged(self.waits)
        found = []
        last = self.started
        for visit in self.visits:
            ended = self.visits[visit.number - 1].began if visit.number else self.ended
            again = sum(clock.seconds(a, b, waits) for a, b in visit.recomputed)
            found.append(
                (
                    clock.seconds(last, visit.entered, waits),
                    clock.seconds(visit.entered, visit.left, waits),
                    max(0.0, clock.seconds(visit.began, ended, waits) - again),
                    again,
                )
            )
            last = visit.left
        return found

    def turn_seconds(self) -> float:
        """From the last forward to the first backward: the head, the loss and their gradient."""
        last = self.visits[-1]
        seconds = self.clock.seconds(last.left, last.began, merged(self.waits))
        return max(0.0, seconds - self._paused())

    def seconds(self, waits: list[Interval]) -> float:
        """All of it, without ``waits`` as far as the clock can tell."""
        return max(0.0, self.clock.seconds(self.started, self.ended, waits) - self._paused())

    def _paused(self) -> float:
        return sum(self.clock.seconds(start, end, []) for start, end in self.pauses)


@dataclass
class Measured:
    """A pass under a plan: what came of it. ``step`` is when its step began, in nanoseconds."""

    step: int
    seconds: float
    peak_bytes: int
    stall_seconds: float
    misses: int
    moved_bytes: int
    transfer_seconds: float
    evicted_bytes: int = 0  # of those, what the plan meant to keep


def signature_of(values: Iterable[object]) -> str:
    """Shapes and types of the tensors among the inputs of a forward.

    Example:
        >>> signature_of([torch.zeros(2, 3), {"mask": None}])
        'float32[2, 3]'
    """
    leaves = [v for v in pytree.tree_leaves(list(values)) if isinstance(v, Tensor)]
    texts = [f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves]
    return ", ".join(texts)
