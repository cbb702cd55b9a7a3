"""Outbound: blocks on their way from the device to host memory and on to the disk.

A new block joins the tail, the newest saved bytes, which backward asks for at once. What no longer
fits there is copied out within ``window_bytes``. On an accelerator it then rests in host memory;
when that runs short, the blocks that have rested longest go on to the disk, as backward wants those
last. Where the device's memory is host memory, every block goes on to the disk at once.

When there is no room the forward waits (backpressure) and does not run out of memory. When anything
fails, the tensor stays where it is: training goes on.

[Note: why a copy on the cpu] The disk could be written from the tensor's own pages. Measured, that
saves 1 % of a step and no memory: the tensor then stays for as long as the slot would have, and the
pool must hold back what is freed or resized under the write.
"""

import weakref
from collections import deque
from typing import NamedTuple

import torch

from offload.blocks.block import Block, State
from offload.blocks.placement import Placement
from offload.engines import PAGE_BYTES, Slot
from offload.engines.budget import LEAST_MOVING, Budget, Reservation
from offload.engines.store import Extent
from offload.report.trace import NOTHING, in_range, now_ns
from offload.tiers.common import Common
from offload.tiers.disk import DiskTier
from offload.tiers.kept import Keeping


class _Leaving(NamedTuple):
    """A block whose copy out was started."""

    block: Block
    extent: Extent | None  # where it goes on to; None if it stays in host memory
    hold: Reservation  # of the window


class _Copied(NamedTuple):
    """A block that has left the device and is bound for the disk, while the last of its copy is on
    its way.
    """

    block: "weakref.ref[Block]"
    extent: Extent

    @property
    def ready(self) -> bool:
        block = self.block()
        return block is None or block.copied.done()


class Outbound:
    """The way out."""

    def __init__(self, common: Common, disk: DiskTier, keeping: Keeping) -> None:
        self.keeping = keeping
        self.window = Budget(common.config.window_bytes)
        self._common = common
        self._disk = disk
        self._tail: deque[weakref.ref[Block]] = deque()  # newest blocks, still on the device
        self._tail_bytes = 0  # of all in the queue, also of those that have died in it
        self._copies: deque[_Leaving] = deque()
        self._copied: deque[_Copied] = deque()
        self._resting: deque[weakref.ref[Block]] = deque()  # in host memory, oldest first

    def admit(self, block: Block, storage: torch.UntypedStorage) -> None:
        """Take on a new block."""
        common = self._common
        block.produced = common.lane.produced(storage)
        if block.slot is None:  # else its slot is what counts
            common.live.track(storage)
        common.sample()
        self.poll()
        self._tail.append(weakref.ref(block))
        self._tail_bytes += block.nbytes
        keep_bytes = common.config.keep_last_bytes if not common.gate.planned else 0
        self.shrink_tail(max(keep_bytes, block.nbytes) if keep_bytes else 0)
        if common.gate.limit_bytes is not None:
            self.make_room_for_next(block.nbytes)

    def make_room_for_next(self, nbytes: int) -> None:
        """After ``nbytes`` were saved. On the cpu a storage counts from when it is saved, and then
        it is too late to make room for it: the next may be as large as any that is to come.
        """
        next_bytes = self._common.gate.note(nbytes)
        self.make_room(next_bytes if self._common.lane.host_is_device else 0)

    def make_room(self, nbytes: int, *, surely: bool = False) -> None:
        """Wait until so many more bytes fit into the budget of device memory, or nothing leaves any
        more. ``surely``: so many are needed now, so that what was to stay leaves as well.
        """
        gate = self._common.gate
        if gate.strict:
            nbytes += PAGE_BYTES  # through which what was to stay can be written
        while not gate.has_room(nbytes):
            if self._copies:  # the device waits, not the host
                self._settle_oldest_copy()
            elif self._copied:
                self._write_oldest()
            elif self._tail:
                self.shrink_tail(0)
            elif self._common.lane.host_is_device and self._disk.writes:
                with self._common.waiting("backpressure", NOTHING):
                    self._disk.settle_first(self._disk.writes)
            elif not ((surely or gate.strict) and self.keeping.send_oldest()):
                break

    @property
    def leaving_bytes(self) -> int:
        """Device memory that becomes free by itself."""
        return self._tail_bytes + self.window.used_bytes

    def waiting_bytes(self, segment: int) -> int:
        """Bytes of the segment's blocks that have not left yet."""
        tail = (r() for r in self._tail)
        blocks = [*tail, *(c.block for c in self._copies), *(c.block() for c in self._copied)]
        if self._common.lane.host_is_device:
            blocks += [t.block() for t in self._disk.writes]
        return sum(b.nbytes for b in blocks if b is not None and b.segment == segment)

    def forget_dead(self) -> None:
        """Drop what has died in the queues."""
        self.keeping.forget_dead()
        self._tail = deque(r for r in self._tail if r() is not None)
        self._resting = deque(r for r in self._resting if r() is not None)
        self._recount_tail()

    def shrink_tail(self, keep_bytes: int) -> None:
        """Send out the oldest of the tail until it has at most ``keep_bytes``."""
        while self._tail and self._tail_bytes > keep_bytes:
            block = self._tail.popleft()()
            if block is None:
                self._recount_tail()
                continue
            self._tail_bytes -= block.nbytes
            self._send_out(block)

    def _recount_tail(self) -> None:
        # The bytes of dead blocks were counted; how many those were is not known any more.
        self._tail_bytes = sum(b.nbytes for b in (r() for r in self._tail) if b is not None)

    def _send_out(self, block: Block) -> None:
        """LIVE -> OFFLOADING, or leave the block where it is and count why."""
        if not block.intact():
            return  # changed since it was saved: these are not the bytes, and unpack says so
        common = self._common
        counters, lane = common.counters, common.lane
        extent = None
        if block.placement is Placement.DISK and common.error is None:
            extent = self._disk.extent(block.nbytes)
        if extent is None and lane.host_is_device:
            reason = "error" if common.error is not None else "budget"
            counters.kept_bytes[reason] += block.nbytes
            return
        if common.gate.limit_bytes is not None:
            self._make_room_for_slot(block)
        room = self._room_now(block) or self._room(block)
        if room is None:
            counters.kept_bytes["budget"] += block.nbytes
            return
        slot, hold = room
        moves = block.slot is None  # a bundle may have been filled there
        common.sample()  # here the original and its slot are both alive
        start_ns = now_ns()
        in_range("offload::offload", block.offload, lane, slot, checksum=common.config.verify)
        counters.offloaded_blocks += 1
        counters.offloaded_bytes += block.nbytes
        if lane.host_is_device:  # the copy is made, by this thread
            if moves:
                end_ns = now_ns()
                common.moved("offload", block.nbytes, start_ns, end_ns, block.subject, waited=True)
                common.begun("offload", 1)
            self._settle_copy(block, extent, hold)
        else:
            common.begun("offload", max(1, lane.in_flight[0]))
            self._copies.append(_Leaving(block, extent, hold))
            self._settle_copies()

    def _make_room_for_slot(self, block: Block) -> None:
        """Where the device is host memory, original and slot are both there for a moment: wait for
        others to leave. If that is not enough, it leaves all the same: what stays would take its
        place in the budget for as long as the graph lives, and so would all that follow.
        """
        if not self._common.lane.host_is_device:
            return
        while not self._common.gate.has_room(block.padded_bytes):
            self._settle_copies()
            if not self._disk.writes:
                if self._common.gate.strict and self.keeping.send_oldest():
                    continue
                return
            with self._common.waiting("backpressure", block.subject):
                self._disk.settle_first(self._disk.writes)

    def poll(self) -> None:
        """Take note of what has completed. Never waits."""
        if self._copies or self._copied:
            self._settle_copies()
        if self._disk.writes or self._disk.reads:
            self._disk.poll()
        if not self._common.lane.host_is_device:
            for passage in self._common.lane.poll():
                self._common.note(passage)

    def settle_all(self) -> None:
        """See out all copies, and start the writes that follow from them."""
        while self._copies:
            self._copies[0].block.copied.synchronize()
            self._settle_oldest_copy()
        while self._copied:
            self._write_oldest()

    def _settle_copies(self) -> None:
        while self._copies and self._copies[0].block.copied.done():
            self._settle_oldest_copy()
        while self._copied and self._copied[0].ready:
            self._write_oldest()

    def _settle_oldest_copy(self) -> None:
        self._settle_copy(*self._copies.popleft())

    def _settle_copy(self, block: Block, extent: Extent | None, hold: Reservation) -> None:
        """OFFLOADING -> HOST; on an accelerator the copy may still be under way."""
        lane = self._common.lane
        if not block.settle_offload(lane):
            self._common.counters.kept_bytes["kind"] += block.nbytes
        elif extent is None:
            self._resting.append(weakref.ref(block))
            if not self._common.gate.needs:  # else a plan says what goes on to the disk
                self._keep_room()
        elif lane.host_is_device:
            self._disk.write(block, extent, hold)
        else:  # the window bounds the memory that it has just left
            self._copied.append(_Copied(weakref.ref(block), extent))

    def _write_oldest(self) -> None:
        copied = self._copied.popleft()
        block = copied.block()
        if block is not None:
            self._disk.write(block, copied.extent, None)

    # -- room -------------------------------------------------------------------------------------

    def _room(self, block: Block) -> tuple[Slot, Reservation] | None:
        """As ``_room_now``, once others have made room. ``None``: waiting would not help."""
        room = None
        with self._common.waiting("backpressure", block.subject):
            while room is None and self._free_a_slot(block.nbytes):
                room = self._room_now(block)
        return room

    def _room_now(self, block: Block) -> tuple[Slot, Reservation] | None:
        """A slot within the window, or ``None`` where the host would have to wait for one: where
        copies are under way, the device waits.
        """
        while True:
            hold = self.window.reserve(block.window_bytes, least=LEAST_MOVING)
            slot = block.slot
            if slot is None and hold is not None:
                slot = self._common.host.slot(block.nbytes)
            if hold is not None and slot is not None:
                return slot, hold
            del hold
            if not self._copies:
                return None
            self._settle_oldest_copy()

    def slot_now(self, nbytes: int) -> Slot:
        """A slot for bytes that backward waits for: others make room for it."""
        host = self._common.host
        slot = host.slot(nbytes)
        while slot is None and self._free_a_slot(nbytes):
            slot = host.slot(nbytes)
        # Else, on the cpu, they are full of what backward is using.
        return slot if slot is not None else host.slot_outside(nbytes)

    def _free_a_slot(self, nbytes: int) -> bool:
        """Wait until host memory becomes free; False if none is going to."""
        host, lane = self._common.host, self._common.lane
        self.settle_all()
        self._spill_resting(nbytes)
        if self._disk.writes:
            self._disk.settle_first(self._disk.writes)
            return True
        held_bytes = host.held_bytes
        lane.drain()  # slots of copies in flight
        return host.held_bytes < held_bytes

    def _keep_room(self) -> None:
        """Spill ahead of need: the next ``window_bytes`` should find host memory free."""
        short_bytes = self.window.limit_bytes - self._common.host.free_bytes
        if short_bytes > 0:
            self._spill_resting(short_bytes, wait=False)

    def _spill_resting(self, nbytes: int, *, wait: bool = True) -> None:
        """Write out the blocks that have rested longest until ``nbytes`` are on their way."""
        leaving_bytes = sum(t.slot.nbytes for t in self._disk.writes)
        while leaving_bytes < nbytes and self._resting and self._common.error is None:
            block = self._resting[0]()
            if block is not None and block.state is State.HOST and block.extent is None:
                if not wait and not block.copied.done():
                    return
                extent = self._disk.extent(block.nbytes)
                if extent is None:
                    return
                self._disk.write(block, extent, None)
                leaving_bytes += block.nbytes
            self._resting.popleft()
