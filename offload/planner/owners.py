"""Which part of a model each saved storage counts for, where several save it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from offload.planner.record import Gap

__all__ = ["Owners"]


class Saves(Protocol):
    """What is known of a segment; see ``SegmentProfile``."""

    @property
    def saved(self) -> dict[int, int]: ...

    @property
    def boundary(self) -> dict[int, int]: ...

    @property
    def before(self) -> Gap: ...

    @property
    def lingering(self) -> dict[int, int]: ...

    @property
    def lingering_back(self) -> dict[int, int]: ...


class Owners:
    """Which entry of the chain each storage counts for.

    What is saved outside of segments stays whatever the plan says, so it counts there. What others
    still hold when backward begins stays as well: it counts for nobody, and is there beside
    whatever runs. Of several segments that save a storage the last one owns it: backward comes to
    that one first, and from then on it has to be there.

    Example:
        Storage 1 is the batch, saved before the first segment; 3 is the result of ``a``, which
        ``b`` saves as well; the loss saves 5, the result of ``b``, while ``a``'s 2 lingers.

        >>> from offload.planner.record import Gap
        >>> from offload.planner.segment_profile import SegmentProfile
        >>> a = SegmentProfile("a", before=Gap({1: 100}), saved={1: 100, 2: 40, 3: 10})
        >>> b = SegmentProfile("b", saved={3: 10, 4: 40, 5: 10}, boundary={3: 10})
        >>> owners = Owners([a, b], after=Gap({5: 10}, lingering={2: 40, 5: 10}))
        >>> owners.own(0), owners.own(1)
        ({2: 40}, {3: 10, 4: 40})
        >>> owners.later_bytes(0), owners.later_bytes(1)  # 3 is b's, 5 the loss's
        (10, 10)
        >>> owners.shared(1)  # of what b owns, 3 is saved by a, too
        {0: 10}
        >>> owners.gap_bytes(0), owners.gap_bytes(1), owners.gap_bytes(2)
        (100, 0, 10)
        >>> owners.beside_gap(2)  # nothing of b, which it reads; 2 in its forward; then nothing
        (0, 40, 0)
    """

    # An entry is told by its place in the chain: 2 i + 1 is segment i, 2 i the gap before it.

    def __init__(self, segments: Sequence[Saves], after: Gap) -> None:
        self._segments = segments
        self._gaps = [*(s.before for s in segments), after]
        self._places: dict[int, int] = {}
        for i, s in enumerate(segments):  # an input that nobody saves is there for who reads it
            self._places |= {k: 2 * i + 1 for k in s.boundary if k not in self._places}
            self._places.update(dict.fromkeys(s.saved, 2 * i + 1))
        self._gap_bytes: list[int] = []
        for i, gap in enumerate(self._gaps):
            new = {k: n for k, n in gap.saved.items() if self._places.get(k, 1) % 2}
            self._places.update(dict.fromkeys(new, 2 * i))
            self._gap_bytes.append(sum(new.values()))
        lingers = segments[-1].lingering_back if segments else {}
        self._kept = {k for k in lingers if self._places.get(k, 0) % 2}

    def gap_bytes(self, i: int) -> int:
        """What counts for the gap before segment ``i``; the last gap comes after all segments."""
        return self._gap_bytes[i]

    def own(self, i: int) -> dict[int, int]:
        """Bytes of the storages that segment ``i`` owns, in the order they are saved."""
        saved = self._segments[i].saved
        return {k: n for k, n in saved.items() if self._is_own(k, i)}

    def _is_own(self, k: int, i: int) -> bool:
        return self._places[k] == 2 * i + 1 and k not in self._kept

    def lasting(self, i: int) -> set[int]:
        """Of what segment ``i`` owns, what an earlier one wants in its backward as well."""
        earlier = (self._segments[j].saved.keys() for j in range(i))
        return set(self.own(i)).intersection(set().union(*earlier))

    def saved_bytes(self, i: int) -> int:
        """Of all that segment ``i`` owns."""
        return sum(self.own(i).values())

    def later_bytes(self, i: int) -> int:
        """What segment ``i`` saves and what follows it owns, or is kept: there all the same."""
        saved = self._segments[i].saved
        kept, place = self._kept, 2 * i + 1
        return sum(n for k, n in saved.items() if self._places[k] > place or k in kept)

    def input_bytes(self, i: int) -> int:
        """Inputs of segment ``i`` that the entry before owns."""
        return sum(self._input(i).values())

    def _input(self, i: int) -> dict[int, int]:
        if i == 0 or self._gap_bytes[i]:  # else that stands between, and it lingers
            return {}
        return {k: n for k, n in self._segments[i].boundary.items() if k in self.own(i - 1)}

    def shared(self, i: int) -> dict[int, int]:
        """Of what segment ``i`` owns, what earlier segments save too: the bytes of each, where of
        several the last one counts.
        """
        found: defaultdict[int, int] = defaultdict(int)
        for k, n in self.own(i).items():
            savers = [j for j in range(i) if k in self._segments[j].saved]
            if savers:
                found[savers[-1]] += n
        return dict(found)

    def boundary(self, i: int) -> dict[int, int]:
        """Bytes of the inputs of segment ``i`` that do not stay anyway."""
        boundary = self._segments[i].boundary
        return {k: n for k, n in boundary.items() if not self._stays(k)}

    def _stays(self, k: int) -> bool:
        """Whatever the plan says."""
        return self._places[k] % 2 == 0 or k in self._kept

    # -- what is there of others ------------------------------------------------------------------

    def beside(self, i: int) -> tuple[int, int]:
        """What is there of others while forward and backward of segment ``i`` run, its input apart.

        Wanted later, or in somebody else's hands: a skip connection, for one, which nobody could
        save later if it was gone by then, and which in backward may stay until the first that saved
        it has run; or a result that the caller collects.
        """
        s, place = self._segments[i], 2 * i + 1
        crossing = self._crossing(place)
        forward = crossing | self._let_go(s.lingering, place)
        forward |= {k: n for k, n in s.boundary.items() if k in self._kept}
        backward = crossing | {
            k: n for k, n in s.lingering_back.items() if k in self._kept or self._place(k) > place
        }
        for k in self._input(i):
            forward.pop(k, None)
        for k in s.saved:
            backward.pop(k, None)
        return sum(forward.values()), sum(backward.values())

    def beside_gap(self, i: int) -> tuple[int, int, int]:
        """The same of the gap before segment ``i``, after what the segment before owns of it."""
        place = 2 * i
        crossing = self._crossing(place)
        forward = crossing | self._let_go(self._gaps[i].lingering, place)
        read_bytes = sum(n for k, n in forward.items() if i and k in self.own(i - 1))
        backward = crossing | {k: n for k, n in forward.items() if k in self._kept}
        return read_bytes, sum(forward.values()) - read_bytes, sum(backward.values())

    def _crossing(self, place: int) -> dict[int, int]:
        """What a segment before saves, or has for an input, and what follows owns."""
        earlier: dict[int, int] = {}
        for j, s in enumerate(self._segments[: place // 2 + place % 2]):
            earlier |= s.boundary | (s.saved if j < place // 2 else {})
        return {k: n for k, n in earlier.items() if self._places[k] > place}

    def _let_go(self, storages: dict[int, int], place: int) -> dict[int, int]:
        """Those that segments before own, and may have let go of."""
        return {k: n for k, n in storages.items() if self._place(k) < place and self._place(k) % 2}

    def _place(self, k: int) -> int:
        """Of what lingered in a pass whose other storages need not be those known here."""
        return self._places.get(k, 0)
