"""SegmentProfile: what one part of a model was measured to take and to save."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass, field

from offload.planner.record import Gap, Visit

__all__ = ["SegmentProfile"]


@dataclass
class SegmentProfile:
    """Of one visit to a segment.

    Attributes:
        saved: bytes of each storage it saves, by its number in the pass, in order.
        boundary: the same of its inputs.
        spans: the first and the last operation that saves each of ``saved``.
        selective: the same of what is held where only what is cheap is computed again: as measured,
            and before that as the results of its operations tell; ``None``: not known.
        collected: of those, results that are in other hands while later segments run, as far as
            only the results tell.
        before: the gap between the segment before and this one.
        seconds: by action, the least seconds of forward, backward and recomputation.
        kept: visits in which all of it stayed.
        before_seconds: between the segment before and this one.
        passing_bytes: most of it that is there at one time while its forward runs and all that it
            saves leaves, its inputs among that; ``None``: not measured.
        lingering: bytes of each storage that others save and somebody else holds while its forward
            runs, such as the caller who collects results.
        lingering_back: the same while its backward runs.
    """

    key: str
    saved: dict[int, int] = field(default_factory=dict)
    boundary: dict[int, int] = field(default_factory=dict)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    selective: dict[int, int] | None = None
    collected: set[int] = field(default_factory=set)
    before: Gap = field(default_factory=Gap)
    seconds: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    kept: int = 0
    before_seconds: float = math.inf
    passing_bytes: int | None = None
    lingering: dict[int, int] = field(default_factory=dict)
    lingering_back: dict[int, int] = field(default_factory=dict)
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0

    @property
    def kind(self) -> tuple[int, ...]:
        """The same for segments that do the same, as far as their bytes tell."""
        return (*self.saved.values(), -1, *self.boundary.values())

    def measured(self, action: str, forward: float, backward: float, again: float) -> None:
        """Take note of one visit's times."""
        if action == "keep":
            self.kept += 1
            if self.kept == 1:  # in memory that was never touched, as what stays takes more of it
                return
        old = self.seconds.get(action, (math.inf,) * 3)
        self.seconds[action] = (
            min(old[0], forward), min(old[1], backward), min(old[2], again),
        )  # fmt: skip

    def note_bytes(self, visit: Visit) -> None:
        """Take note of what one visit saved, and of the memory that this took."""
        kind = visit.action.partition("+")[0]
        saved_bytes, known_bytes = sum(visit.saved.values()), sum(self.saved.values())
        if (
            kind == "recompute"
            and saved_bytes >= known_bytes
            and (visit.saved or visit.before.saved or visit.before.held)
        ):
            self.saved, self.boundary, self.before = visit.saved, visit.held, visit.before
            self.spans = visit.spans
            self.lingering, self.lingering_back = visit.lingering, visit.lingering_back
            self.forward_peak_bytes = visit.forward_peak_bytes
            self.backward_peak_bytes = visit.backward_peak_bytes
            if visit.selected:
                self.selective = {**visit.held, **visit.selected}
                self.collected = visit.collected - visit.held.keys()
        elif kind == "selective" and visit.held:
            self.selective = visit.held
        elif visit.passing_bytes:
            found = [n for k, n in visit.lingering.items() if k in visit.held]  # there before
            self.passing_bytes = max(self.passing_bytes or 0, visit.passing_bytes + sum(found))

    def most_at_once(self, storages: dict[int, int], lasting: Container[int] = frozenset()) -> int:
        """The most of ``storages`` that backward needs at one time, where each comes when the last
        operation that has saved it asks for it, and goes when the first has run; those that are
        ``lasting`` when the segment's backward is over.

        Example:
            >>> spans = {1: (10, 12), 2: (11, 11), 3: (13, 13)}  # by the numbers of operations
            >>> segment = SegmentProfile("blocks.0", spans=spans)
            >>> segment.most_at_once({1: 4, 2: 8, 3: 16})  # 3 alone, then 1, 1 and 2, 1
            16
            >>> segment.most_at_once({1: 4, 2: 8})
            12
            >>> segment.most_at_once({1: 4, 2: 8, 3: 16}, lasting={3})
            28
        """
        changes = []
        for number, nbytes in storages.items():
            first, last = self.spans.get(number, (-1, 1 << 62))  # not seen: all the while
            first = -1 if number in lasting else first
            changes += [(last, nbytes), (first - 0.5, -nbytes)]
        there = most = 0
        for _, change in sorted(changes, reverse=True):
            there += change
            most = max(most, there)
        return most
