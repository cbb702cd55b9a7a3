"""Rooms: before each segment runs, the tiers make the room that it needs by the plan in force."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from offload.planner.overruns import Overruns
from offload.planner.record import Pass, Visit
from offload.tiers import Tiers

__all__ = ["Rooms"]


class Rooms:
    """Of one controller, which has the session's gate to itself until ``close()``.

    Args:
        tiers: of the session.
        overruns: tells when to be strict; ``None`` where what is kept cannot leave.
    """

    def __init__(self, tiers: Tiers, overruns: Overruns | None) -> None:
        self._tiers = tiers
        self._overruns = overruns
        self._limit_bytes = tiers.gate.limit_bytes
        tiers.gate.planned = True

    def close(self) -> None:
        """Make the gate what it was."""
        gate = self._tiers.gate
        gate.limit_bytes, gate.needs, gate.planned = self._limit_bytes, (), False
        gate.strict = False

    def begin(self, current: Pass, waiting: Iterable[weakref.ref[Pass]]) -> None:
        """The forward of ``current`` begins, or its backward, while others are still to come."""
        gate, assigned = self._tiers.gate, current.assignment
        with self._tiers.lock:
            gate.begin(assigned.needs, current.first)
            if self._overruns is not None:
                others = [p for p in (r() for r in waiting) if p is not None]
                gate.strict = self._overruns.is_strict(current, others)
            if assigned.limit_bytes is not None:
                gate.limit_bytes = assigned.limit_bytes

    def make(self, current: Pass, entry: int) -> None:
        """The forward of this entry of the plan begins."""
        needs = current.assignment.needs
        if entry < len(needs):
            with self._tiers.lock:
                self._tiers.gate.enter(entry)
                self._tiers.make_room(needs[entry].forward_bytes)

    def make_back(self, current: Pass, visit: Visit, *, planned: bool) -> None:
        """The backward of ``visit`` begins; ``planned``: when it was to."""
        entry, needs, gate = 2 * visit.number + 1, current.assignment.needs, self._tiers.gate
        with self._tiers.lock:
            gate.strict |= self._overruns is not None and not planned
            gate.at = entry if entry < len(needs) else -1
            if entry < len(needs):
                there = self._tiers.leaving_bytes(current.first + entry)
                self._tiers.make_room(max(0, needs[entry].backward_bytes - there))
