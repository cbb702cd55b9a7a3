"""Gate: a hard budget of device memory, and the reserve that the rest of a step needs of it.

[Note: the reserve rule] What is brought back early for a segment stays while the backward of every
segment in between runs. So it may come only if each of those still has the room that it needs then;
to look at what is free now is not enough, and can end with nothing left to let go of. Where a plan
is in force it says what each segment needs; without one only the limit counts.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

__all__ = ["STRIDE", "UNPLANNED", "Gate", "Need"]

STRIDE = 1 << 16  # between the numbers of a segment's blocks in two forwards of a step
UNPLANNED = STRIDE - 1  # instead of an entry: of what takes no part in backward, or none as planned


class Need(NamedTuple):
    """What the plan in force says of one segment. Bytes."""

    forward_bytes: int  # that appear while its forward runs
    backward_bytes: int  # that appear while its backward runs
    room_bytes: int  # what may be there early, of segments before it, while its backward runs
    reserve_bytes: int  # that segments after it need at some time, beyond all that is kept
    keep_bytes: int = 0  # that it is planned to keep
    # That its backward needs beside what it saved, where all of that comes before anything of
    # another segment does; -1 where it is computed again.
    working_bytes: int = -1
    saves: tuple[int, ...] = ()  # of each storage that its forward saves, as far as was measured


class Gate:
    """The budget of one session. Called under the tiers' lock.

    Args:
        used: bytes of device memory in use now.

    Example:
        >>> gate = Gate(lambda: 60)
        >>> gate.limit_bytes = 100
        >>> gate.has_room(40), gate.has_room(41)
        (True, False)
    """

    def __init__(self, used: Callable[[], int]) -> None:
        self.limit_bytes: int | None = None
        self.planned = False  # whether something else decides what stays
        # Whether something is alive, or runs, that the plan does not know of. What it says is
        # needed then leaves no room to hope: what was to stay makes room for it.
        self.strict = False
        self.needs: Sequence[Need] = ()
        self.first = 0  # what the blocks of the forward that ``needs`` is true of are numbered from
        self.at = -1  # the segment whose backward runs; -1: none has begun
        self.runs = -1  # the segment whose forward runs; -1: none, or no plan is in force
        self._kept: dict[int, int] = {}  # bytes, by segment
        self._beyond = False  # whether a segment has more of them than it is planned to keep
        self._to_come: list[int] = []  # bytes of each storage that it is still to save, if planned
        self._largest: dict[int, int] = {}  # bytes of a storage, by the segment that saves it
        self._used = used

    @property
    def used_bytes(self) -> int:
        """Device memory in use."""
        return self._used()

    @property
    def is_open(self) -> bool:
        """Whether there is neither limit nor plan: with either, each storage counts by itself."""
        return self.limit_bytes is None and not self.planned

    @property
    def room_bytes(self) -> int:
        """What is left of the limit."""
        return self.limit_bytes - self._used() if self.limit_bytes is not None else 1 << 62

    def has_room(self, nbytes: int) -> bool:
        """Whether so many more bytes stay within the limit."""
        return self.limit_bytes is None or self._used() + nbytes <= self.limit_bytes

    def begin(self, needs: Sequence[Need], first: int = 0) -> None:
        """A forward that ``needs`` is true of begins, or the backward of one that was waiting."""
        if needs is not self.needs:
            self._largest.clear()
        self.needs, self.at, self.runs, self.first = needs, -1, -1, first
        self._to_come = []
        self._kept.clear()
        self._beyond = False

    def enter(self, segment: int) -> None:
        """The forward of ``segment`` begins."""
        self.runs, self._to_come = segment, list(self._planned(segment))

    def _planned(self, segment: int) -> tuple[int, ...]:
        return self.needs[segment].saves if 0 <= segment < len(self.needs) else ()

    def note(self, nbytes: int) -> int:
        """A storage of ``nbytes`` was saved: the largest that the segment that runs is still to
        save. Where it does not do as planned, or once did not, the largest that was planned for it
        or seen of it, or of all while it is new.
        """
        if nbytes in self._to_come:
            self._to_come.remove(nbytes)
            return max(*self._to_come, self._largest.get(self.runs, 0), 0)
        self._to_come = []
        planned = max(self._planned(self.runs), default=0)
        known = self._largest.get(self.runs)
        if known is None:
            self._largest[self.runs] = nbytes
            return max(planned, *self._largest.values())
        if nbytes > known:
            self._largest[self.runs] = known = nbytes
        return max(planned, known)

    def may_keep(self, segment: int, nbytes: int, leaving_bytes: int) -> bool:
        """Whether so many bytes more may stay: as planned, or with enough left for what follows.

        Where a segment keeps more than was measured, something has to leave after all: of it, or of
        those that follow, which can no longer count on what they were to keep.
        """
        segment -= self.first
        if self.limit_bytes is None or not 0 <= segment < len(self.needs):
            return True
        need = self.needs[segment]
        kept_bytes = self._kept[segment] = self._kept.get(segment, 0) + nbytes
        if kept_bytes > need.keep_bytes:
            self._beyond = True
        if not self._beyond:
            return True
        return self._used() - leaving_bytes + nbytes + need.reserve_bytes <= self.limit_bytes

    def may_prefetch(self, segment: int, nbytes: int, early: Iterable[tuple[int, int]]) -> bool:
        """Whether bytes of ``segment`` may come back now. See Note: the reserve rule.

        Args:
            segment: -1 if they belong to none.
            nbytes: how many.
            early: segment and bytes of what has come early and was not asked for yet.
        """
        if self.limit_bytes is None:
            return True
        if not self.has_room(nbytes):
            return False
        if self.planned and (self.strict or not self.needs):
            return False  # nothing is known: what is wanted comes when it is wanted
        if not self.needs or segment < 0:
            return True
        if self.at < 0:
            return False  # what the segment that backward begins with needs comes first
        return self._leaves_reserve(segment, nbytes, early)

    def _leaves_reserve(self, segment: int, nbytes: int, early: Iterable[tuple[int, int]]) -> bool:
        # What another forward saved may stay through all of this backward and a further forward.
        is_own = self._follows(segment) > 0
        early_bytes = [0] * len(self.needs)  # that each has to do with fewer, from it on
        for owner, held_bytes in early:
            if self._follows(owner) <= self.at:
                early_bytes[self._follows(owner)] += held_bytes
        total = 0
        for k in range(self.at + 1 if is_own else len(self.needs)):
            total += early_bytes[k]
            if k < self._follows(segment):
                continue
            if k == self.at and is_own and self.needs[k].working_bytes >= 0:
                # It runs: what it needed no more is room as well.
                if not self.has_room(nbytes + self.needs[k].working_bytes):
                    return False
            elif total + nbytes > self.needs[k].room_bytes:
                return False
        return True

    def _follows(self, segment: int) -> int:
        """The entry that comes after ``segment`` in the forward: 0, the first, for one of another
        forward.
        """
        entry = segment - self.first
        return entry + 1 if 0 <= entry < len(self.needs) else 0
