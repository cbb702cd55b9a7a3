"""Profile: what each segment of a model was measured to take and to save, for one shape of input.

It is filled from passes of a model under known actions, the leanest first, so that measuring needs
no more memory than the leanest plan. Bytes are exact. Times are the least of what was seen, as
disturbances only add, and the median over segments that save the same: equal blocks take equal
times. Keeping adds nothing to a segment's own time; what other actions add is measured.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from offload.planner.model import UNLIMITED, Chain, Links, Option, Segment
from offload.planner.owners import Owners
from offload.planner.record import Pass, Visit

__all__ = ["Budgets", "Profile", "SegmentProfile"]

_COPY_BYTES_PER_S = 8e9  # into a slot on the cpu, until offloading was measured
_FRACTIONS = (0.25, 0.5, 0.75)
_FRACTIONS_BELOW = 40  # segments: more options would make the search of longer chains slow


@dataclass(frozen=True)
class Budgets:
    """What a plan may use. Bytes.

    Args:
        device_bytes: see ``Config.device_budget``.
        host_bytes: of host memory; without meaning where that is the device's.
        disk_bytes: of the disk.
        window_bytes: most on their way out.
        prefetch_bytes: most back early.
    """

    device_bytes: float
    host_bytes: float = math.inf
    disk_bytes: float = math.inf
    window_bytes: float = math.inf
    prefetch_bytes: float = math.inf


@dataclass
class SegmentProfile:
    """Of one visit to a segment.

    Attributes:
        saved: bytes of each storage it saves, by its number in the pass, in order.
        boundary: the same of its inputs.
        spans: the first and the last operation that saves each of ``saved``.
        selective: the same of what is held where only what is cheap is computed again; ``None``:
            not measured.
        before: saved between the segment before and this one.
        seconds: by action, the least seconds of forward, backward and recomputation.
        before_seconds: between the segment before and this one.
        passing_bytes: most of it that is there at one time while its forward runs and all that it
            saves leaves; ``None``: not measured.
    """

    key: str
    saved: dict[int, int] = field(default_factory=dict)
    boundary: dict[int, int] = field(default_factory=dict)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    selective: dict[int, int] | None = None
    before: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, tuple[float, float, float]] = field(default_factory=dict)
    before_seconds: float = math.inf
    passing_bytes: int | None = None
    extra_bytes: int = 0  # of ``selective``, what is not among what it saves
    forward_peak_bytes: int = 0
    backward_peak_bytes: int = 0

    @property
    def kind(self) -> tuple[int, ...]:
        """The same for segments that do the same, as far as their bytes tell."""
        return (*self.saved.values(), -1, *self.boundary.values())

    def small_bytes(self, least: int) -> int:
        """Of what it saves, what is smaller than ``least``."""
        return sum(n for n in self.saved.values() if n < least)

    def measured(self, action: str, forward: float, backward: float, again: float) -> None:
        """Take note of one visit's times."""
        old = self.seconds.get(action, (math.inf,) * 3)
        self.seconds[action] = (
            min(old[0], forward), min(old[1], backward), min(old[2], again),
        )  # fmt: skip


class Profile:
    """See the module's text.

    Args:
        slow: the tier next to the device, ``"host"`` or ``"disk"``.
        min_offload_bytes: what is smaller stays.
    """

    def __init__(self, slow: str, min_offload_bytes: int) -> None:
        self.slow = slow
        self.min_offload_bytes = min_offload_bytes
        self.base_bytes = 0  # of the device, in use by the model where the budget counts that
        self._full_bytes = math.inf  # with all gradients
        self.segments: list[SegmentProfile] = []
        self.after: dict[int, int] = {}
        self.turn_seconds = math.inf
        self.links = Links()
        self.in_flight = 1  # forwards that wait for their backward at one time

    @property
    def keys(self) -> list[str]:
        """The segments' keys, in order."""
        return [s.key for s in self.segments]

    def learn(self, done: Pass) -> bool:
        """Take note of a pass; False if it does not fit what was seen before."""
        if not done.complete:
            return False
        segments = self.segments or [SegmentProfile(v.key) for v in done.visits]
        if [v.key for v in done.visits] != [s.key for s in segments]:
            return False
        self.in_flight = max(self.in_flight, done.in_flight)
        rows = done.times()
        if done.start_bytes:
            # The least: what the step before still had on its way out is not of the model.
            self._full_bytes = min(self._full_bytes, done.start_bytes + done.gradient_bytes)
            self.base_bytes = int(self._full_bytes) - done.gradient_bytes
            self._add_gradients(done)
        for known, visit, (before, *seconds) in zip(segments, done.visits, rows, strict=True):
            known.before_seconds = min(known.before_seconds, before)
            known.measured(visit.action, *seconds)
            _note_bytes(known, visit)
        self.segments = segments  # last, as an interrupt must not leave them without times
        self.turn_seconds = min(self.turn_seconds, done.turn_seconds())
        if done.all_recomputed and done.after:
            self.after = done.after  # its numbers are those of the same pass's segments
        return True

    def _add_gradients(self, done: Pass) -> None:
        """Gradients of parameters stay: those made before a segment's backward add to its peak, and
        those outside of segments may all be.
        """
        made = done.gradient_bytes - sum(v.gradient_bytes for v in done.visits)
        for visit in reversed(done.visits):
            visit.backward_peak_bytes += max(0, made)
            made += visit.gradient_bytes

    def pooled(self, segment: SegmentProfile) -> dict[str, tuple[float, float, float]]:
        """By action, the segment's seconds: the median over those that save the same."""
        alike = [s for s in self.segments if s.kind == segment.kind]
        found = {}
        for action in segment.seconds:
            rows = [s.seconds[action] for s in alike if action in s.seconds]
            forward, backward, again = (
                statistics.median(column) for column in zip(*rows, strict=True)
            )
            found[action] = (forward, backward, again)
        return found

    # -- the chain --------------------------------------------------------------------------------

    def chain(self, budgets: Budgets) -> Chain:
        """The problem for the solver; see ``entries`` for how its segments correspond."""
        return Chain(
            tuple(s for s, _ in self.entries()),
            device_bytes=budgets.device_bytes - self.base_bytes,
            out_rate=self._rate("out"),
            back_rate=self._rate("back"),
            host_bytes=budgets.host_bytes if self.slow == "host" else math.inf,
            disk_bytes=budgets.disk_bytes,
            write_rate=self._disk_rate(self.links.disk_write),
            read_rate=self._disk_rate(self.links.disk_read),
            window_bytes=budgets.window_bytes,
            prefetch_bytes=budgets.prefetch_bytes,
            in_flight=self.in_flight,
        )

    def _rate(self, way: str) -> float:
        links = self.links
        if self.slow == "disk":
            rate = links.disk_write if way == "out" else links.disk_read
        else:
            rate = links.link_out if way == "out" else links.link_in
        return rate if rate else UNLIMITED

    def _disk_rate(self, rate: float | None) -> float:
        return rate if self.slow == "host" and rate else UNLIMITED

    def entries(self) -> list[tuple[Segment, int]]:
        """The chain's segments, each with the number of its visit; ``-1``: between two, always
        kept.
        """
        found: list[tuple[Segment, int]] = []
        owners = Owners(self.segments, self.after)
        waiting = 0.0  # seconds of a gap that saves nothing
        for i, s in enumerate(self.segments):
            gap_bytes = owners.gap_bytes(s.before)
            if gap_bytes:
                found.append((_gap(f"before {s.key}", _finite(s.before_seconds), gap_bytes), -1))
            else:
                waiting = _finite(s.before_seconds)
            found.append((self._segment(i, owners, waiting), i))
            waiting = 0.0
        turn = _finite(self.turn_seconds)
        head = _gap("head and loss", turn / 3, owners.gap_bytes(self.after), turn * 2 / 3)
        return [*found, (head, -1)]

    def _segment(self, i: int, owners: Owners, waiting: float) -> Segment:
        s = self.segments[i]
        seconds = self.pooled(s)
        base_forward, base_backward = _base_seconds(seconds)
        saved, shared = owners.saved_bytes(i), owners.shared_bytes(i)
        later = owners.later_bytes(i)
        peak = max(later, s.forward_peak_bytes - saved)
        lean = min(s.forward_peak_bytes, saved)  # where nothing that is saved stays
        options = _Options(self, seconds, owners, i, (base_forward, base_backward), lean).all()
        return Segment(
            s.key,
            base_forward + waiting,
            base_backward,
            saved,
            options,
            forward_bytes=peak,
            backward_bytes=max(later, s.backward_peak_bytes - saved),
            shared_bytes=shared,
        )


class _Options:
    """The options of one segment."""

    def __init__(
        self,
        profile: Profile,
        seconds: dict[str, tuple[float, float, float]],
        owners: Owners,
        number: int,
        base: tuple[float, float],
        lean_bytes: int,
    ) -> None:
        self._profile = profile
        self._s = profile.segments[number]
        self._seconds = seconds
        self._forward, self._backward = base
        self._lean_bytes = lean_bytes
        self._own, self._boundary = owners.own(number), owners.boundary(number)

    def all(self) -> tuple[Option, ...]:
        """What the runtime can do with it, the leanest last."""
        profile = self._profile
        tiers = [profile.slow]
        if profile.slow == "host" and profile.links.disk_write and profile.links.disk_read:
            tiers.append("disk")
        saved = sum(self._own.values())
        made = [self._option("keep", saved, {}, saved)]
        shares = _FRACTIONS if len(profile.segments) < _FRACTIONS_BELOW else ()
        for tier in tiers:
            made += [self._partly(tier, share) for share in shares if len(self._own) > 1]
            made.append(self._away(tier, self._own))
        if self._s.selective:
            held = self._s.selective
            held_bytes = sum(held.values())
            made.append(self._option("selective+keep", held_bytes, {}, held_bytes))
            made += [self._away(f"selective+{tier}", held) for tier in tiers]
        boundary = sum(self._boundary.values())
        made.append(self._option("recompute", boundary, {}, boundary))
        made += [self._away(f"recompute+{tier}", self._boundary) for tier in tiers]
        return tuple(made)

    def _away(self, action: str, storages: dict[int, int]) -> Option:
        least, saved = self._profile.min_offload_bytes, sum(storages.values())
        leaving = {k: n for k, n in storages.items() if n >= least}
        return self._option(action, saved - sum(leaving.values()), leaving, saved)

    def _partly(self, tier: str, share: float) -> Option:
        """The first so much of what it saves; backward wants the rest first."""
        least, saved = self._profile.min_offload_bytes, sum(self._own.values())
        leaving, gone = {}, 0
        for number, nbytes in self._own.items():
            if nbytes >= least and gone + nbytes <= share * saved:
                leaving[number] = nbytes
                gone += nbytes
        return self._option(f"{tier}:{share:.0%}", saved - gone, leaving, saved)

    def _option(
        self,
        action: str,
        resident: int,
        leaving: dict[int, int],
        present: int,
    ) -> Option:
        pieces = tuple(leaving.values())
        away, largest, last = sum(pieces), max(pieces, default=0), pieces[-1] if pieces else 0
        on_cpu = self._profile.slow == "disk"
        name = action.partition(":")[0]
        ahead, back = self._extra(name, away)
        if name != action:  # a part costs a part
            share = away / max(1, sum(self._own.values()))
            ahead, back = share * ahead, share * back
        kind, _, tier = name.partition("+")
        bound = tier or kind
        again = kind in ("recompute", "selective")
        last = last if name == action else 0  # a part is what it saves first
        if on_cpu:  # the original and its slot are both there while one is copied to the other
            present, beside = present + largest, 2 * largest
        else:
            lean = self._lean_bytes if again else 0
            present, beside = present + lean, lean
        passing = self._s.passing_bytes if leaving and not again else None
        if passing is not None:  # else its forward may hold on to all that it saved
            present = min(present, resident + max(passing, beside + last))
            if name == action:
                beside = max(beside, passing - last)
        return Option(
            action,
            resident_bytes=resident,
            offload_bytes=away,
            present_bytes=present,
            last_bytes=last,
            beside_bytes=beside,
            host_bytes=away if bound == "host" else 0,
            disk_bytes=away if bound == "disk" else 0,
            working_bytes=self._s.extra_bytes if kind == "selective" else 0,
            spared_bytes=away - _most_at_once(leaving, self._s.spans)
            if on_cpu and not again
            else 0,
            forward_seconds=ahead,
            backward_seconds=back,
            holds_output=kind == "keep" or name != action,  # its result is what it saves last
            frees_input=away > 0,  # and its input what it saves first
            whole=again or not leaving,
            pieces=pieces,
        )

    def _extra(self, action: str, away: int) -> tuple[float, float]:
        """Seconds more than the base, in forward and in backward."""
        if action == "keep":
            return 0.0, 0.0
        slow = self._profile.slow
        kind = action.partition("+")[0]
        # Where the inputs go makes little difference, and all kinds were measured with one of them.
        known = self._seconds.get(f"{kind}+{slow}") or self._seconds.get(action)
        if known is not None:
            return (
                max(0.0, known[0] - self._forward),
                max(0.0, known[1] + known[2] - self._backward),
            )
        copy = away / _COPY_BYTES_PER_S if slow == "disk" else 0.0
        return copy, self._forward if kind == "recompute" else 0.0


def _base_seconds(seconds: dict[str, tuple[float, float, float]]) -> tuple[float, float]:
    """Forward and backward with nothing else to do: no action can take less."""
    rows = list(seconds.values())
    return min(r[0] for r in rows), min(r[1] for r in rows)


def _most_at_once(storages: dict[int, int], spans: dict[int, tuple[int, int]]) -> int:
    """The most of ``storages`` that backward needs at one time, where each comes when the last
    operation that has saved it asks for it, and goes when the first has run.
    """
    changes = []
    for number, nbytes in storages.items():
        first, last = spans.get(number, (-1, 1 << 62))  # not seen: all the while
        changes += [(last, nbytes), (first - 0.5, -nbytes)]
    there = most = 0
    for _, change in sorted(changes, reverse=True):
        there += change
        most = max(most, there)
    return most


def _note_bytes(known: SegmentProfile, visit: Visit) -> None:
    kind = visit.action.partition("+")[0]
    if kind == "recompute" and sum(visit.saved.values()) >= max(1, sum(known.saved.values())):
        known.saved, known.boundary, known.before = visit.saved, visit.held, visit.before
        known.spans = visit.spans
        known.forward_peak_bytes = visit.forward_peak_bytes
        known.backward_peak_bytes = visit.backward_peak_bytes
    elif kind == "selective" and visit.held:
        known.selective = visit.held
        known.extra_bytes = sum(n for k, n in visit.held.items() if k not in visit.saved)
    elif visit.passing_bytes:
        known.passing_bytes = max(known.passing_bytes or 0, visit.passing_bytes)


def _gap(name: str, forward: float, saved: int, backward: float = 0.0) -> Segment:
    keep = Option("keep", resident_bytes=saved, present_bytes=saved)
    return Segment(name, forward, backward, saved, (keep,))


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
