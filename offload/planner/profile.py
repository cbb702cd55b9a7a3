"""ModelProfile: what a model's segments were measured to take and save, for one shape of input.

It is filled from passes of a model under known actions, the leanest first, so that measuring needs
no more memory than computing one segment after the other again. Bytes are exact. Times are the
least of what was seen, as disturbances only add, and the median over segments that save the same:
equal blocks take equal times. A segment's own time is that of keeping all of it; what other actions
add is measured.
"""

from __future__ import annotations

import copy
import math
import statistics
from dataclasses import dataclass, replace

from offload.planner.model import UNLIMITED, Chain, Links, Segment, Shared
from offload.planner.options import NOTHING_MORE, OptionsOf, base_seconds
from offload.planner.owners import Owners
from offload.planner.record import Gap, Pass
from offload.planner.segment_profile import SegmentProfile

__all__ = ["MARGIN", "Budgets", "ModelProfile"]

MARGIN = 0.01  # of the budget, for what is not counted exactly
_DIVIDED_BELOW = 40  # segments: more options would make the search of longer chains slow


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


class ModelProfile:
    """See the module's text.

    Args:
        slow: the tier next to the device, ``"host"`` or ``"disk"``.
        min_offload_bytes: what is smaller stays.
    """

    def __init__(self, slow: str, min_offload_bytes: int) -> None:
        self.slow = slow
        self.min_offload_bytes = min_offload_bytes
        self.base_bytes = 0  # of the device, in use by the model where the budget counts that
        # Of other passes, in other hands while forward and backward run.
        self.leftover_bytes = self.leftover_back_bytes = 0
        self._full_bytes = math.inf  # with all gradients
        self.segments: list[SegmentProfile] = []
        self.after = Gap()
        self.turn_seconds = math.inf
        self.links = Links()
        self.in_flight = 1  # forwards that wait for their backward at one time

    @property
    def keys(self) -> list[str]:
        """The segments' keys, in order."""
        return [s.key for s in self.segments]

    @property
    def late_bytes(self) -> int:
        """Of the caller's inputs, what is saved in the middle of the forward: in memory all the
        while, and counted from there on.
        """
        gaps = [*(s.before for s in self.segments), self.after]
        return sum(n for gap in gaps[1:] for n in gap.held.values())

    def learn(self, done: Pass) -> bool:
        """Take note of a pass; False if it does not fit what was seen before."""
        if not done.complete:
            return False
        segments = self.segments or [SegmentProfile(v.key) for v in done.visits]
        if [v.key for v in done.visits] != [s.key for s in segments]:
            return False
        self.in_flight = max(self.in_flight, done.in_flight)
        rows = done.times()
        self._note_leftover(done)
        if done.start_bytes:
            # The least: what the step before still had on its way out is not of the model.
            self._full_bytes = min(self._full_bytes, done.start_bytes + done.gradient_bytes)
            self.base_bytes = int(self._full_bytes) - done.gradient_bytes
            self._add_gradients(done)
        for known, visit, (before, *seconds) in zip(segments, done.visits, rows, strict=True):
            known.before_seconds = min(known.before_seconds, before)
            known.measured(visit.action, *seconds)
            known.note_bytes(visit)
        self.segments = segments  # last, as an interrupt must not leave them without times
        self.turn_seconds = min(self.turn_seconds, done.turn_seconds())
        if done.all_recomputed and (done.after.saved or done.after.held):
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

    def _note_leftover(self, done: Pass) -> None:
        again = done.saved.keys() | done.held.keys()
        over, back = (
            sum(n for k, n in storages.items() if k not in again)
            for storages in (done.leftover, done.leftover_back)
        )
        self.leftover_bytes = max(self.leftover_bytes, over)
        self.leftover_back_bytes = max(self.leftover_back_bytes, back)

    def hopeful(self) -> ModelProfile:
        """A copy for which what passes through segments is nothing, where it was not measured."""
        made = copy.deepcopy(self)
        for segment in made.segments:
            segment.passing_bytes = segment.passing_bytes or 0
        return made

    def pooled(self, segment: SegmentProfile) -> dict[str, tuple[float, float, float]]:
        """By action, the segment's seconds: the median over those that save the same."""
        alike = [s for s in self.segments if s.kind == segment.kind]
        found = {}
        for action in dict.fromkeys(action for s in alike for action in s.seconds):
            rows = [s.seconds[action] for s in alike if action in s.seconds]
            forward, backward, again = (
                statistics.median(column) for column in zip(*rows, strict=True)
            )
            found[action] = (forward, backward, again)
        return found

    # -- the chain --------------------------------------------------------------------------------

    def chain(self, budgets: Budgets) -> Chain:
        """The problem for the solver."""
        return Chain(
            self.entries(),
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

    def chain_with_margin(self, budgets: Budgets, missed_bytes: int) -> Chain:
        """The same with a margin, and without ``missed_bytes``. Where we count the memory
        ourselves, storage by storage, the floor needs no margin: there is none just above it.
        """
        chain = self.chain(budgets)
        room_bytes = chain.device_bytes - missed_bytes
        margin_bytes = MARGIN * budgets.device_bytes + self.late_bytes
        if self._is_exact:
            above_bytes = room_bytes - chain.floor()[0]
            margin_bytes = min(margin_bytes, max(0.0, above_bytes - margin_bytes))
        return replace(chain, device_bytes=room_bytes - margin_bytes)

    def floor_bytes(self, budgets: Budgets) -> int:
        """The least device budget that a plan can be made for."""
        floor_bytes = self.chain(budgets).floor()[0] + self.base_bytes
        return math.ceil(floor_bytes / (1.0 if self._is_exact else 1 - MARGIN))

    @property
    def _is_exact(self) -> bool:
        return self.slow == "disk"

    def _rate(self, way: str) -> float:
        links = self.links
        if self.slow == "disk":
            rate = links.disk_write if way == "out" else links.disk_read
        else:
            rate = links.link_out if way == "out" else links.link_in
        return rate if rate else UNLIMITED

    def _disk_rate(self, rate: float | None) -> float:
        return rate if self.slow == "host" and rate else UNLIMITED

    def entries(self) -> tuple[Segment, ...]:
        """The segments, and what lies between them."""
        found: list[Segment] = []
        owners = Owners(self.segments, self.after, on_cpu=self.slow == "disk")
        at: dict[int, int] = {}  # by place, where it is in the chain

        def add(place: int, made: Segment) -> None:
            at[place] = len(found)
            shared, lingering = (
                tuple(Shared(at[place] - at[p], n) for p, n in of.items())
                for of in (owners.shared(place), owners.lingering(place))
            )
            found.append(replace(made, shared=shared, lingering=lingering))

        for i, s in enumerate(self.segments):
            before_seconds = _finite(s.before_seconds)
            if owners.own(2 * i):
                add(2 * i, self._gap(f"before {s.key}", 2 * i, owners, before_seconds))
                before_seconds = 0.0
            add(2 * i + 1, self._segment(i, owners, before_seconds))
        turn = _finite(self.turn_seconds)
        last = 2 * len(self.segments)
        add(last, self._gap("head and loss", last, owners, turn / 3, turn * 2 / 3))
        return tuple(found)

    def _segment(self, i: int, owners: Owners, waiting: float) -> Segment:
        """Args:
        waiting: seconds of a gap before it that saves nothing.
        """
        s, place = self.segments[i], 2 * i + 1
        seconds = self.pooled(s)
        base_forward, base_backward = base_seconds(seconds)
        later, saved = owners.later_bytes(i), sum(owners.own(place).values())
        beside, beside_back = self._beside(owners, place)
        peak = max(later, s.forward_peak_bytes - saved)
        options = OptionsOf(
            s,
            own=owners.own(place),
            saved=s.saved,
            lasting=owners.lasting(i),
            boundary=owners.boundary(i),
            later_bytes=later,
            seconds=seconds,
            links=self.links,
            slow=self.slow,
            least_bytes=self.min_offload_bytes,
        )
        return Segment(
            s.key,
            base_forward + waiting,
            base_backward,
            saved,
            options.all(in_parts=len(self.segments) < _DIVIDED_BELOW),
            forward_bytes=beside + peak,
            backward_bytes=beside_back + max(later, s.backward_peak_bytes - saved),
        )

    def _beside(self, owners: Owners, place: int) -> tuple[int, int]:
        """What is there of others, also of other passes, while forward and backward run."""
        forward, backward = owners.beside(place)
        return forward + self.leftover_bytes, backward + self.leftover_back_bytes

    def _gap(
        self, name: str, place: int, owners: Owners, forward: float, backward: float = 0.0
    ) -> Segment:
        own = owners.own(place)
        beside, beside_back = self._beside(owners, place)
        options = OptionsOf(
            SegmentProfile(name),
            own=own,
            saved={},
            lasting=set(),
            boundary={},
            later_bytes=0,
            seconds=NOTHING_MORE,
            links=self.links,
            slow=self.slow,
            least_bytes=self.min_offload_bytes,
        )
        return Segment(
            name,
            forward,
            backward,
            sum(own.values()),
            options.of_gap(owners.movable(place)),
            forward_bytes=beside,
            backward_bytes=beside_back,
            is_gap=True,
        )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
