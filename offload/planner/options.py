"""Options: what the runtime can do with a segment, and what each way takes.

Bytes follow from the storages that the segment owns, times are those of the passes that measured
it. On the cpu, whose memory is that of the slots as well, a storage that leaves is there twice for
a moment; an example of a segment that saves storages of 4, 2 and 6 MiB, in MiB:

    keep            12 stay
    disk            nothing stays; 6 may not have left when its forward ends; 12 = 2 * 6 are there
                    while the last is copied
    disk:50%        what it saves first leaves, up to the half: 4 and 2; the last 6 stay
    recompute       its input stays
    recompute+disk  its input leaves
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.engines import padded
from offload.planner.model import Links, Option
from offload.planner.segment_profile import SegmentProfile

__all__ = ["NOTHING_MORE", "OptionsOf", "Seconds", "base_seconds"]

Seconds = dict[str, tuple[float, float, float]]  # of forward, backward, recomputation, by action
NOTHING_MORE: Seconds = {"keep": (0.0, 0.0, 0.0)}  # than its own time, whatever that is
_COPY_BYTES_PER_S = 8e9  # into a slot on the cpu, until offloading was measured
_PARTS = (0.25, 0.5, 0.75)


@dataclass(frozen=True)
class OptionsOf:
    """A segment and all that its options depend on.

    Args:
        segment: as measured.
        own: bytes of the storages that count for it, by number, in the order they are saved.
        saved: the same of all that it saves.
        lasting: which of them an earlier segment saves as well.
        boundary: the same of its inputs.
        later_bytes: of all that it saves, what counts for others.
        seconds: by action, the median over all segments of its kind.
        links: rates between the tiers.
        slow: the tier next to the device, ``"host"`` or ``"disk"``.
        least_bytes: what is smaller stays.
    """

    segment: SegmentProfile
    own: dict[int, int]
    saved: dict[int, int]
    lasting: set[int]
    boundary: dict[int, int]
    later_bytes: int
    seconds: Seconds
    links: Links
    slow: str
    least_bytes: int

    def all(self, *, in_parts: bool) -> tuple[Option, ...]:
        """What the runtime can do with it, the leanest last; ``in_parts``: also with a part."""
        tiers = [self.slow]
        if self.slow == "host" and self.links.disk_write and self.links.disk_read:
            tiers.append("disk")
        made = [self._kept("keep", self.own)]
        for tier in tiers:
            if in_parts and len(self.saved) > 1:
                made += [self._partly(tier, share) for share in _PARTS]
            made.append(self._away(tier, self.own))
        ways = [("recompute", "recompute", self.boundary)]
        if self.segment.selective:
            ways.insert(0, ("selective+keep", "selective", self.segment.selective))
        for kept, kind, held in ways:
            made.append(self._kept(kept, held))
            made += [self._away(f"{kind}+{tier}", held) for tier in tiers]
        return tuple(made)

    def of_gap(self, movable: dict[int, int]) -> tuple[Option, ...]:
        """The same of what lies between segments: all of it stays, or what may leave does."""
        leaving = {k: n for k, n in movable.items() if n >= self.least_bytes}
        kept = self._kept("keep", self.own)
        return (kept, self._option(self.slow, self.own, leaving)) if leaving else (kept,)

    def _kept(self, action: str, storages: dict[int, int]) -> Option:
        return self._option(action, storages, {})

    def _away(self, action: str, storages: dict[int, int]) -> Option:
        stays = self.segment.collected if action.startswith("selective") else set()
        leaving = {k: n for k, n in storages.items() if n >= self.least_bytes and k not in stays}
        return self._option(action, storages, leaving)

    def _partly(self, tier: str, share: float) -> Option:
        """The first so much of what it saves; backward wants the rest first. As the hooks do it: to
        send what others own frees nothing, and counts.
        """
        left_bytes = limit_bytes = int(share * sum(self.saved.values()))
        leaving = {}
        for number, nbytes in self.saved.items():
            if self.least_bytes <= nbytes <= left_bytes:
                left_bytes -= nbytes
                if number in self.own:
                    leaving[number] = nbytes
        made = self._option(f"{tier}:{share:.0%}", self.own, leaving)
        return replace(made, limit_bytes=limit_bytes)

    def _option(self, action: str, storages: dict[int, int], leaving: dict[int, int]) -> Option:
        """To hold ``storages``, of which ``leaving`` leave."""
        name, is_part = action.partition(":")[0], ":" in action
        kind, _, tier = name.partition("+")
        again = kind in ("recompute", "selective")
        resident = sum(storages.values()) - sum(leaving.values())
        # Also what others own; and inputs of the model that it is the first to save.
        saves = {**self.segment.before.held, **(storages if again else self.saved or self.own)}
        if self.slow == "disk":
            leaving = {k: padded(n) for k, n in leaving.items()}  # of a slot
        away = sum(leaving.values())
        ahead, back = self._extra(name, away)
        if is_part:  # a part costs a part
            share = away / max(1, sum(self.own.values()))
            ahead, back = share * ahead, share * back
        last, present, beside, most = self._while_it_leaves(resident, leaving, again, is_part)
        # Held, and not among what is computed again.
        besides = {k: n for k, n in storages.items() if again and k not in self.segment.saved}
        return Option(
            action,
            resident_bytes=resident,
            offload_bytes=away,
            present_bytes=present,
            last_bytes=last,
            beside_bytes=beside,
            host_bytes=away if "host" in (kind, tier) else 0,
            disk_bytes=away if "disk" in (kind, tier) else 0,
            working_bytes=sum(besides.values()),
            spared_bytes=sum(storages.values()) - resident - most,
            forward_seconds=ahead,
            backward_seconds=back,
            holds_output=kind == "keep" or is_part,  # its result is what it saves last
            frees_input=away > 0,  # and its input what it saves first
            whole=again or not leaving,
            pieces=tuple(leaving.values()),
            saves=tuple(n for n in saves.values() if n >= self.least_bytes),
        )

    def _while_it_leaves(
        self, resident: int, leaving: dict[int, int], again: bool, is_part: bool
    ) -> tuple[int, int, int, int]:
        """``last_bytes``, ``present_bytes`` and ``beside_bytes`` of an option, and the most of what
        leaves that is there at one time in backward.
        """
        away, largest = sum(leaving.values()), max(leaving.values(), default=0)
        # A part is what it saves first, and has left when it ends.
        last = next(reversed(leaving.values()), 0) if not is_part else 0
        if self.slow != "disk":
            peak_bytes = self.segment.forward_peak_bytes
            lean = min(peak_bytes, sum(self.own.values())) if again else 0  # nothing of it stays
            return last, resident + away + lean, lean, away
        # Original and slot are both there while one is copied to the other, perhaps at the end of
        # a forward that still uses all that it saved.
        present = resident + away + largest
        beside = min(2 * largest, away + largest - last)  # ``last`` waits, and is counted there
        passing = self.segment.passing_bytes if leaving and not again else None
        if passing is not None:  # it was seen what is there at one time, with all that is small
            small = sum(n for n in self.own.values() if n < self.least_bytes)
            passing = max(last, passing - self.later_bytes - small)
            present = min(present, resident + passing)
            beside = present - resident - last
        most = away if again else self.segment.most_at_once(leaving, self.lasting)
        return last, present, beside, most

    def _extra(self, action: str, away: int) -> tuple[float, float]:
        """Seconds more than the base, in forward and in backward."""
        if action == "keep":
            return 0.0, 0.0
        forward, backward = base_seconds(self.seconds)
        kind = action.partition("+")[0]
        # Where the inputs go makes little difference, and all kinds were measured with one of them.
        known = self.seconds.get(f"{kind}+{self.slow}") or self.seconds.get(action)
        if known is not None:
            return max(0.0, known[0] - forward), max(0.0, known[1] + known[2] - backward)
        copy = away / _COPY_BYTES_PER_S if self.slow == "disk" else 0.0
        return copy, forward if kind in ("recompute", "selective") else 0.0


def base_seconds(seconds: Seconds) -> tuple[float, float]:
    """Forward and backward with nothing else to do: as measured where all of it was kept, and
    before that as with the action that takes least. Memory that stays in use is slower to work
    beside, so that other actions may take less. They are not said to: nothing is to leave for that.

    Example:
        >>> base_seconds({"disk": (3.0, 4.0, 0.0), "recompute+disk": (2.0, 5.0, 2.0)})
        (2.0, 4.0)
        >>> base_seconds({"disk": (3.0, 4.0, 0.0), "keep": (2.0, 6.0, 0.0)})
        (2.0, 6.0)
    """
    rows = [seconds["keep"]] if "keep" in seconds else list(seconds.values())
    return min(r[0] for r in rows), min(r[1] for r in rows)
