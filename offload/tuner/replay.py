"""Replay: what a step would take, wait for and hold under a setting, from a plain one's record.

A replay walks through the saves and uses of the record, does with each storage what the tiers would
do with it (``tiers/outbound`` and ``tiers/inbound`` name the rules), and keeps clocks: of the
computation, and of the link or the disk. Values in, values out; nothing runs.

    Replay          the walk, the tail, lives and deaths, what is alive; what both kinds share
    replay_link.py  an accelerator: copies on two streams within the windows, the host runs ahead
    replay_disk.py  the CPU: copies into slots by the thread that computes, one disk, reads first

What is left out: the disk behind an accelerator (host memory is taken to suffice), bundles of
small storages, pieces of host memory, small allocations, and other processes. What they cost,
``search.Calibration`` learns from measured steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from dataclasses import dataclass, replace
from itertools import repeat

from offload.engines.budget import LEAST_MOVING, has_room
from offload.probe import MachineProfile
from offload.tuner.record import Beyond, StepRecord, Touch, live_bytes
from offload.tuner.setting import Setting

__all__ = ["Replay", "ReplayedStep", "plain_peak_bytes", "scaled"]


@dataclass(frozen=True)
class ReplayedStep:
    """What a step comes to.

    Attributes:
        seconds: of the step.
        stall_seconds: backward waited for bytes.
        backpressure_seconds: forward waited for room.
        peak_live_bytes: on the CPU most bytes of saved storages and of the memory that they pass
            through; on an accelerator most bytes that the step has allocated there.
        moved_bytes: that left; storages count once.
        moved_blocks: how many those were.
    """

    seconds: float
    stall_seconds: float
    backpressure_seconds: float
    peak_live_bytes: int
    moved_bytes: int
    moved_blocks: int


def scaled(record: StepRecord, seconds: float) -> StepRecord:
    """The same step in another time: what the recording itself cost is not the model's.

    Example:
        >>> record = StepRecord((), (Touch(5, 4, 0, 0, False),), 10)
        >>> scaled(record, 2e-8).touches[0].at_ns
        10
    """
    factor = seconds * 1e9 / record.end_ns if record.end_ns else 1.0
    touches = (
        t._replace(at_ns=round(t.at_ns * factor), host_ns=round(t.host_ns * factor))
        for t in record.touches
    )
    return replace(record, touches=tuple(touches), end_ns=round(record.end_ns * factor))


class Replay(ABC):
    """One walk through a record. Times in nanoseconds from the step's start, as floats."""

    def __init__(self, record: StepRecord, setting: Setting, profile: MachineProfile) -> None:
        self.record = record
        self.setting = setting
        self.profile = profile.at(setting.io_threads, setting.io_block_bytes)
        self.now_ns = 0.0  # how far the computation is
        self.stall_ns = self.backpressure_ns = 0.0
        self.live_bytes = self.peak_bytes = 0
        self._beyond_bytes = 0  # at the moment
        self._touches = 0  # so far
        self._lingering: list[tuple[int, int]] = []  # originals of what has left: until when, bytes
        self.moved_bytes = self.moved_blocks = 0
        self.dead: set[int] = set()
        least_bytes = max(1, setting.min_offload_bytes)
        self.leaves = [b.movable and b.nbytes >= least_bytes for b in record.blocks]
        self._tail: deque[int] = deque()
        self._tail_bytes = 0
        # The prefetcher learns the order from the step before; here that is this one.
        order: dict[int, int] = {}
        for touch in record.touches:
            if touch.is_use and self.leaves[touch.block]:
                order.setdefault(touch.save, touch.block)
        self._places = list(order.values())
        self._rank = {save: rank for rank, save in enumerate(order)}
        self._cursor = 0
        self._at_hand = -1  # the block saved last, or asked for last
        self._early: set[int] = set()  # brought back, and not asked for yet
        self._early_bytes = 0
        self._uses_left = Counter(t.block for t in record.touches if t.is_use)
        self._dying: list[int] = []

    def run(self) -> ReplayedStep:
        """Walk through the step."""
        last_ns, saved = 0, set()
        beyond = self.record.beyond or [Beyond(0, 0)] * (len(self.record.touches) + 1)
        for touch, (before_bytes, after_bytes) in zip(self.record.touches, beyond, strict=False):
            self.now_ns += touch.at_ns - last_ns
            last_ns = touch.at_ns
            self._bury()
            self._see(before_bytes)
            self._beyond_bytes = after_bytes
            self._touches += 1
            if touch.is_use:
                self._use(touch)
            elif touch.block not in saved:
                saved.add(touch.block)
                self._save(touch)
        self.now_ns += self.record.end_ns - last_ns
        self._bury()
        self._see(beyond[-1].before_bytes)
        return ReplayedStep(
            self.now_ns / 1e9, self.stall_ns / 1e9, self.backpressure_ns / 1e9, self.peak_bytes,
            self.moved_bytes, self.moved_blocks,
        )  # fmt: skip

    # -- lives and deaths --------------------------------------------------------------------------

    def hold(self, nbytes: int) -> None:
        """More bytes are alive."""
        self.live_bytes += nbytes
        self._see(self._beyond_bytes)

    def drop(self, block: int) -> None:
        """The original of a block that has left: gone now, or when others let go of it."""
        if self.record.blocks[block].held:
            return
        released = self.record.released[block] if self.record.released else 0
        if released > self._touches:
            self._lingering.append((released, self.record.blocks[block].nbytes))
        else:
            self.live_bytes -= self.record.blocks[block].nbytes

    def _see(self, beyond_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + beyond_bytes)

    def _bury(self) -> None:
        """What was used for the last time is gone when the next operation begins, and so is what
        has left and nobody else holds any more.
        """
        gone = [n for until, n in self._lingering if until <= self._touches]
        if gone:
            self.live_bytes -= sum(gone)
            self._lingering = [entry for entry in self._lingering if entry[0] > self._touches]
        for block in self._dying:
            if not self.record.blocks[block].held:
                self.dead.add(block)
                self.died(block)
        self._dying.clear()

    def wait(self, until_ns: float, counter: str) -> None:
        """The computation waits."""
        if until_ns > self.now_ns:
            waited_ns = getattr(self, counter) + until_ns - self.now_ns
            setattr(self, counter, waited_ns)
            self.now_ns = until_ns

    # -- saves: the tail ---------------------------------------------------------------------------

    def _save(self, touch: Touch) -> None:
        block, nbytes = touch.block, self.record.blocks[touch.block].nbytes
        self.hold(nbytes)
        if not self.leaves[block]:
            return
        self.saved(touch)
        self._tail.append(block)
        self._tail_bytes += nbytes
        keep_bytes = self.setting.keep_last_bytes
        keep_bytes = max(keep_bytes, nbytes) if keep_bytes else 0
        while self._tail_bytes > keep_bytes:
            oldest = self._tail.popleft()
            if oldest in self.dead:
                alive = (b for b in self._tail if b not in self.dead)
                self._tail_bytes = sum(self.record.blocks[b].nbytes for b in alive)
                continue
            self._tail_bytes -= self.record.blocks[oldest].nbytes
            if self.send_out(oldest):
                self.moved_bytes += self.record.blocks[oldest].nbytes
                self.moved_blocks += 1

    # -- uses: the prefetcher ----------------------------------------------------------------------

    def _use(self, touch: Touch) -> None:
        block = touch.block
        if self.leaves[block]:
            self.demand(touch)
            if block in self._early:
                self._early.remove(block)
                self._early_bytes -= self.record.blocks[block].nbytes
            self._at_hand = block
            self._look_ahead(self._rank[touch.save])
            self.take(block)
        self._uses_left[block] -= 1
        if not self._uses_left[block]:
            self._dying.append(block)

    def _look_ahead(self, rank: int) -> None:
        if self._cursor <= rank:
            self._cursor = rank + 1
        while self._cursor < len(self._places):
            block = self._places[self._cursor]
            if block not in self.dead and self.is_away(block) and not self._bring_early(block):
                return
            self._cursor += 1

    def _bring_early(self, block: int) -> bool:
        """As ``tiers.Inbound`` does: together with what is at hand within ``prefetch_bytes``. What
        others hold is there, and has its part of that all the same.
        """
        if not self.setting.prefetch_bytes:
            return False
        blocks = self.record.blocks
        left_bytes = self.setting.prefetch_bytes - blocks[self._at_hand].nbytes
        nbytes = blocks[block].nbytes
        if not has_room(self._early_bytes, nbytes, left_bytes, LEAST_MOVING):
            return False
        if not blocks[block].held and not self.prefetch(block):
            return False
        self._early.add(block)
        self._early_bytes += nbytes
        return True

    # -- what the kinds differ in ------------------------------------------------------------------

    @abstractmethod
    def saved(self, touch: Touch) -> None:
        """A block that may leave was saved."""

    @abstractmethod
    def send_out(self, block: int) -> bool:
        """It leaves; False if there is no room for it and it stays."""

    @abstractmethod
    def is_away(self, block: int) -> bool:
        """Whether it would have to be brought back."""

    @abstractmethod
    def prefetch(self, block: int) -> bool:
        """Start bringing it back; False if there is no room now."""

    @abstractmethod
    def demand(self, touch: Touch) -> None:
        """It is wanted now: start bringing it back if need be."""

    @abstractmethod
    def take(self, block: int) -> None:
        """Wait until it is there."""

    @abstractmethod
    def died(self, block: int) -> None:
        """Nobody wants it any more."""


def plain_peak_bytes(record: StepRecord) -> int:
    """The most bytes alive in the step as it was recorded, where nothing moves.

    Example:
        >>> from offload.tuner.record import BlockRecord
        >>> save, use = Touch(10, 10, 0, 0, False), Touch(20, 20, 0, 0, True)
        >>> plain_peak_bytes(StepRecord((BlockRecord(64, True, False),), (save, use), 30))
        64
    """
    alive = live_bytes(record.blocks, record.touches)
    beyond = record.beyond or repeat(Beyond(0, 0))
    pairs = (zip(*both, strict=True) for both in zip(alive, beyond, strict=False))
    return max(saved_bytes + beyond_bytes for pair in pairs for saved_bytes, beyond_bytes in pair)
