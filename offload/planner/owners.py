"""Which part of a model each saved storage counts for, where several save it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

__all__ = ["Owners"]


class Saves(Protocol):
    """Bytes by the number of a storage: what a segment saves, its inputs, and what lies before."""

    @property
    def saved(self) -> dict[int, int]: ...

    @property
    def boundary(self) -> dict[int, int]: ...

    @property
    def before(self) -> dict[int, int]: ...


class Owners:
    """Which entry of the chain each storage counts for.

    What is saved outside of segments stays whatever the plan says, so it counts there. Of several
    segments that save a storage the last one owns it: backward comes to that one first, and from
    then on it has to be there.

    Example:
        Storage 1 is the batch, saved before the first segment; 3 is the result of ``a``, which
        ``b`` saves as well; the loss saves 5, the result of ``b``.

        >>> from offload.planner.segment_profile import SegmentProfile
        >>> a = SegmentProfile("a", before={1: 100}, saved={1: 100, 2: 40, 3: 10})
        >>> b = SegmentProfile("b", saved={3: 10, 4: 40, 5: 10})
        >>> owners = Owners([a, b], after={5: 10})
        >>> owners.own(0), owners.own(1)
        ({2: 40}, {3: 10, 4: 40})
        >>> owners.later_bytes(0), owners.later_bytes(1)  # 3 is b's, 5 the loss's
        (10, 10)
        >>> owners.shared_bytes(1)  # of what b owns, 3 is saved by a, too
        10
    """

    def __init__(self, segments: Sequence[Saves], after: dict[int, int]) -> None:
        self._segments = segments
        self._gaps: dict[int, int] = {}  # by storage, the segment that follows its first gap
        gaps = [*(s.before for s in segments), after]
        for i, gap in enumerate(gaps):
            self._gaps.update(dict.fromkeys((k for k in gap if k not in self._gaps), i))
        self._last: dict[int, int] = {}
        for i, s in enumerate(segments):
            self._last.update(dict.fromkeys(s.saved, i))
        self._seen: set[int] = set()

    def gap_bytes(self, saved: dict[int, int]) -> int:
        """Bytes of what is saved in a gap, and in none that was asked for before."""
        new = {k: n for k, n in saved.items() if k not in self._seen}
        self._seen.update(new)
        return sum(new.values())

    def own(self, i: int) -> dict[int, int]:
        """Bytes of the storages that segment ``i`` owns, in the order they are saved."""
        s = self._segments[i]
        return {k: n for k, n in s.saved.items() if k not in self._gaps and self._last[k] == i}

    def lasting(self, i: int) -> set[int]:
        """Of what segment ``i`` owns, what an earlier one wants in its backward as well."""
        earlier = (self._segments[j].saved.keys() for j in range(i))
        return set(self.own(i)).intersection(set().union(*earlier))

    def saved_bytes(self, i: int) -> int:
        """Of all that segment ``i`` owns."""
        return sum(self.own(i).values())

    def later_bytes(self, i: int) -> int:
        """What segment ``i`` saves and what follows it owns: there while it runs, all the same."""
        saved = self._segments[i].saved.items()
        return sum(n for k, n in saved if self._gaps.get(k, self._last[k]) > i)

    def crossing_bytes(self, i: int) -> int:
        """What is there while segment ``i`` runs, as one before saves it and what follows owns it.

        A skip connection, for one: nobody could save it later if it was gone by then, and in
        backward it may stay until the first that saved it has run.
        """
        earlier = {k: n for j in range(i) for k, n in self._segments[j].saved.items()}
        return sum(n for k, n in earlier.items() if self._gaps.get(k, self._last[k]) > i)

    def shared_bytes(self, i: int) -> int:
        """Of what segment ``i`` owns, what the segment before saves too."""
        if i == 0:
            return 0
        before, own = self._segments[i - 1].saved, self._segments[i].saved
        return sum(
            n for k, n in own.items() if k in before and k not in self._gaps and self._last[k] == i
        )

    def boundary(self, i: int) -> dict[int, int]:
        """Bytes of the inputs of segment ``i`` that no gap saves."""
        return {k: n for k, n in self._segments[i].boundary.items() if k not in self._gaps}
