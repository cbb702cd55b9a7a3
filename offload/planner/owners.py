"""Which part of a model each saved storage counts for, where several save it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Protocol

from offload.engines import padded
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
        >>> a = SegmentProfile("a", before=Gap(held={1: 100}), saved={1: 100, 2: 40, 3: 10})
        >>> b = SegmentProfile("b", saved={3: 10, 4: 40, 5: 10}, boundary={3: 10})
        >>> owners = Owners([a, b], after=Gap({5: 10}, lingering={2: 40, 5: 10}))
        >>> [owners.own(place) for place in range(5)]
        [{1: 100}, {2: 40}, {}, {3: 10, 4: 40}, {5: 10}]
        >>> owners.later_bytes(0), owners.later_bytes(1)  # 3 is b's, 5 the loss's
        (10, 10)
        >>> owners.shared(3)  # of what b owns, 3 is saved by a, too
        {1: 10}
        >>> owners.lingering(4)  # while the loss runs, what a owns
        {1: 40}
    """

    # An entry is told by its place: 2 i + 1 is segment i, 2 i the gap before it. On an accelerator
    # it is not known what lingers, and gaps keep what they save.

    def __init__(self, segments: Sequence[Saves], after: Gap, *, on_cpu: bool = True) -> None:
        self._segments = segments
        self._on_cpu = on_cpu
        self._gaps = [*(s.before for s in segments), after]
        self._places: dict[int, int] = {}
        for i, s in enumerate(segments):  # an input that nobody saves is there for who reads it
            self._places |= {k: 2 * i + 1 for k in s.boundary if k not in self._places}
            self._places.update(dict.fromkeys(s.saved, 2 * i + 1))
        for i, gap in enumerate(self._gaps):
            new = [k for k in gap.held | gap.saved if self._places.get(k, 1) % 2]
            self._places.update(dict.fromkeys(new, 2 * i))
        self._lingering_last = segments[-1].lingering_back if segments else {}
        self._kept = {k for k in self._lingering_last if self._places.get(k, 0) % 2}
        places = range(2 * len(segments) + 1)
        self._own = [self._owned(place) for place in places]
        self._movable = [
            {k: n for k, n in self._own[place].items() if self._may_leave(k, place)}
            for place in places
        ]

    def own(self, place: int) -> dict[int, int]:
        """Bytes of the storages that an entry owns, in the order they are saved."""
        return self._own[place]

    def _owned(self, place: int) -> dict[int, int]:
        i, is_segment = divmod(place, 2)
        saved = self._segments[i].saved if is_segment else self._gaps[i].held | self._gaps[i].saved
        return {k: n for k, n in saved.items() if self._places[k] == place and k not in self._kept}

    def movable(self, place: int) -> dict[int, int]:
        """Of those, what may leave: of a gap, what nobody needs to have stay."""
        return self._movable[place]

    def _may_leave(self, k: int, place: int) -> bool:
        """Of a gap: its owner lets go, no later entry saves it, and it is in nobody's hands when
        backward begins.
        """
        if place % 2 or not self._on_cpu:
            return place % 2 == 1
        later = (s.saved for s in self._segments[place // 2 :])
        gaps = (gap.saved for gap in self._gaps[place // 2 + 1 :])
        return not (
            k in self._gaps[place // 2].held
            or k in self._lingering_last
            or any(k in saved for saved in (*later, *gaps))
        )

    def lasting(self, i: int) -> set[int]:
        """Of what segment ``i`` owns, what an earlier one wants in its backward as well."""
        earlier = (self._segments[j].saved.keys() for j in range(i))
        return set(self.own(2 * i + 1)).intersection(set().union(*earlier))

    def later_bytes(self, i: int) -> int:
        """What segment ``i`` saves and what follows it owns, or is kept: there all the same."""
        saved = self._segments[i].saved
        kept, place = self._kept, 2 * i + 1
        return sum(n for k, n in saved.items() if self._places[k] > place or k in kept)

    def boundary(self, i: int) -> dict[int, int]:
        """Bytes of the inputs of segment ``i`` that do not stay anyway."""
        boundary, place = self._segments[i].boundary, 2 * i + 1
        return {k: n for k, n in boundary.items() if not self._stays(k, place)}

    def _stays(self, k: int, place: int) -> bool:
        """Whatever the plan says."""
        owner = self._places[k]
        if owner % 2:
            return k in self._kept
        return owner > place or k not in self.movable(owner)

    def shared(self, place: int) -> dict[int, int]:
        """Of what an entry may let go of, what earlier segments save too: the bytes of each, by its
        place, where of several the last one counts.
        """
        found: defaultdict[int, int] = defaultdict(int)
        for k, n in self.movable(place).items():
            savers = [j for j in range(place // 2) if k in self._segments[j].saved]
            if savers:
                found[2 * savers[-1] + 1] += n
        return dict(found)

    # -- what is there of others ------------------------------------------------------------------

    def lingering(self, place: int) -> dict[int, int]:
        """What is there while the forward of an entry runs, though its owner may have let go of it:
        the bytes, by the place of the owner.
        """
        found: defaultdict[int, int] = defaultdict(int)
        for k, n in self._in_hands(place).items():
            owner = self._places.get(k, place)
            if owner < place and k in self.movable(owner):
                found[owner] += n
        return dict(found)

    def _in_hands(self, place: int) -> dict[int, int]:
        """What somebody holds, or the entry reads, when its forward begins."""
        if place % 2 == 0:
            return self._gaps[place // 2].lingering
        s = self._segments[place // 2]
        return s.lingering | {k: n for k, n in s.boundary.items() if self._places[k] < place}

    def beside(self, place: int) -> tuple[int, int]:
        """What is there of others in any case while forward and backward of an entry run.

        Wanted later, or kept by somebody else: a skip connection, for one, which nobody could save
        later if it was gone by then, and which in backward may stay until the first that saved it
        has run; or a result that the caller collects.
        """
        crossing = self._crossing(place)
        forward = crossing | {k: n for k, n in self._in_hands(place).items() if self._is_kept(k)}
        if place % 2 == 0:
            saved: dict[int, int] = {}
            lingering_back = {k: n for k, n in forward.items() if k in self._kept}
        else:
            s = self._segments[place // 2]
            saved, lingering_back = s.saved, s.lingering_back
        backward = self._back(crossing) | {
            k: n for k, n in lingering_back.items() if k in self._kept or self._place(k) > place
        }
        for gap in self._gaps[place // 2 + 1 :]:  # saved later, and the caller's all the while
            backward |= {k: n for k, n in gap.held.items() if self._places[k] > place}
        for k in saved:  # that is its own, or comes later
            forward.pop(k, None)
            backward.pop(k, None)
        return sum(forward.values()), sum(backward.values())

    def _back(self, storages: dict[int, int]) -> dict[int, int]:
        """As large as they are when they have come back: on the cpu, in slots."""
        return {k: padded(n) for k, n in storages.items()} if self._on_cpu else storages

    def _is_kept(self, k: int) -> bool:
        """Whether it is no entry's: somebody keeps it, or it is an input that nobody saves."""
        owner = self._place(k)
        return owner % 2 == 1 and k not in self.own(owner)

    def _crossing(self, place: int) -> dict[int, int]:
        """What a segment before saves, or has for an input, and what follows owns."""
        earlier: dict[int, int] = {}
        for j, s in enumerate(self._segments[: place // 2 + place % 2]):
            earlier |= s.boundary | (s.saved if j < place // 2 else {})
        return {k: n for k, n in earlier.items() if self._places[k] > place}

    def _place(self, k: int) -> int:
        """Of what lingered in a pass whose other storages need not be those known here."""
        return self._places.get(k, 0)
