"""Inbound: blocks on their way back to the device, on demand or ahead of it."""

import contextlib
import weakref
from collections import deque
from collections.abc import Iterator
from typing import TypeGuard

import torch

from offload.blocks.block import Block, State
from offload.blocks.tickets import Ticket
from offload.engines.budget import LEAST_MOVING, Budget, Reservation
from offload.report.trace import in_range
from offload.tiers.common import Common
from offload.tiers.disk import DiskTier
from offload.tiers.outbound import Outbound


class Inbound:
    """The way back. What is brought back before it was asked for stays within ``prefetch_bytes``,
    together with the block that the computation has at hand, which is the one saved or asked for
    last: bytes of device memory on an accelerator, of slots where the device's memory is host
    memory. Two blocks may come whatever their size.
    """

    def __init__(self, common: Common, disk: DiskTier, outbound: Outbound) -> None:
        self.ahead = Budget(common.config.prefetch_bytes)
        self._common = common
        self._disk = disk
        self._outbound = outbound
        self._asked_last = -1  # the block asked for last
        self._guesses: deque[weakref.ref[Block]] = deque()  # brought back ahead in this step
        self._fetching: deque[weakref.ref[Block]] = deque()  # of those, not yet on the device

    def use(self, block: Block) -> None:
        """The computation has ``block`` at hand now, which leaves less for what comes early."""
        left_bytes = self._common.config.prefetch_bytes - block.window_bytes
        self.ahead.limit_bytes = left_bytes if left_bytes > 0 else 0

    def prefetch(self, block: Block) -> bool:
        """Start bringing ``block`` back, unless it is there or on its way; False if there is no
        room for it now.
        """
        common, lane, state = self._common, self._common.lane, block.state
        if state is State.FETCHING or state is State.LIVE or state is State.OFFLOADING:
            return True
        if block.reservation is not None or block.id == self._asked_last:
            return True  # fetched already, about to be reloaded
        # Whoever keeps the original alive may let go of it: a slot that is still there is better.
        in_slot = lane.host_is_device and state is not State.DISK
        there = block.resident() if not in_slot else None
        if there is not None and block.held is not None:
            return True
        gate, more_bytes = common.gate, block.padded_bytes if there is None else 0
        if gate.limit_bytes is not None and not gate.may_prefetch(
            block.segment, more_bytes, self.early()
        ):
            return False
        hold = self._room(block)
        if hold is None:
            return False
        if there is not None:
            block.hold(there, hold)  # for the same reason
            common.counters.forwarded_bytes += block.nbytes
        elif state is State.DISK:
            slot = common.host.slot(block.nbytes)
            if slot is None:
                return False
            self._disk.read(block, slot, hold)
            if not lane.host_is_device:
                self._fetching.append(weakref.ref(block))
        elif self._try_reload(block):
            block.reservation = hold
            if lane.host_is_device:  # still being written: it keeps its slot, and is not read
                common.counters.forwarded_bytes += block.nbytes
        else:
            return False
        self._guesses.append(weakref.ref(block))
        return True

    def _room(self, block: Block) -> Reservation | None:
        while self._guesses and not _is_early(self._guesses[0]()):
            self._guesses.popleft()
        if self._common.config.prefetch_bytes <= 0:
            return None
        return self.ahead.reserve(block.window_bytes, least=LEAST_MOVING)

    def early(self) -> Iterator[tuple[int, int]]:
        """Segment and bytes of what was brought back and not asked for yet."""
        for block in (r() for r in self._guesses):
            if _is_early(block):
                yield block.segment, block.window_bytes

    def drop_guesses(self) -> None:
        """Let go of what was brought back ahead and never asked for: a guess ends with its step."""
        for block in (r() for r in self._guesses):
            if not _is_early(block):
                continue
            request = block.request if block.state is State.FETCHING else None
            if request is not None and (request.done() or request.cancel()):
                with contextlib.suppress(OSError):
                    block.settle_fetch()
            block.unload()
            if block.state is State.HOST and block.extent is not None:
                block.release_slot()
        self._guesses.clear()
        self._fetching.clear()

    def at_hand(self, block: Block) -> torch.UntypedStorage | None:
        """Its device storage if it was what backward asked for last, and is still there: of a
        bundle that is true of all members but the first.
        """
        storage = block.held if block.id == self._asked_last else None
        if storage is not None:
            self._common.counters.hits += 1
        return storage

    def demand(self, block: Block) -> torch.UntypedStorage | None:
        """Backward wants ``block`` now: note how near it is, and start bringing it if need be.

        Returns:
            The device storage if it has one, perhaps still on its way.
        """
        if self._fetching:
            self._reload_fetched()
        counters = self._common.counters
        if block.state is State.FETCHING and block.request is not None and block.request.done():
            with contextlib.suppress(OSError):  # a guess that failed: read again
                block.settle_fetch()
        storage = block.resident()
        if storage is not None:
            if block.arrived:
                counters.hits += 1
            else:
                counters.lates += 1
            counters.forwarded_bytes += block.nbytes if block.reservation is None else 0
        elif block.state is State.FETCHING and block.request is not None:
            counters.lates += 1
            block.request.promote()
        elif block.state is State.DISK:
            counters.misses += 1
            if self._common.gate.planned and self._common.lane.host_is_device:  # sure to come
                self._outbound.make_room(block.padded_bytes, surely=True)
            self._disk.read(block, self._outbound.slot_now(block.nbytes), None)
        elif self._common.lane.host_is_device:
            counters.hits += 1
            in_time = block.extent is None or block.state is State.SPILLING
            counters.forwarded_bytes += block.nbytes if in_time else 0
        else:
            counters.misses += 1
            storage = self._reload(block)
        block.reservation = None  # from here on it is at hand, and not early
        self._asked_last = block.id
        self.use(block)
        return storage

    def take(self, ticket: Ticket, storage: torch.UntypedStorage | None) -> torch.UntypedStorage:
        """The device storage of the ticket's demanded block, ordered before the caller's work.

        Args:
            ticket: whose block it is.
            storage: what ``demand`` gave.

        Raises:
            StorageError: the bytes could not be brought back.
        """
        block = ticket.block
        if storage is None:
            if block.state is State.FETCHING:
                self._wait_for_read(block, ticket)
            storage = self._reload(block)
        block.serve(self._common.lane, ticket, storage)
        return storage

    def _reload(self, block: Block) -> torch.UntypedStorage:
        lane = self._common.lane
        storage = in_range("offload::reload", block.reload, lane)
        if not lane.host_is_device:
            self._common.begun("reload", max(1, lane.in_flight[1]))
        self._common.counters.reloaded_bytes += block.nbytes
        if block.state is State.HOST and block.extent is not None:
            block.release_slot()  # whoever copies from it or aliases it keeps its memory
        return storage

    def _try_reload(self, block: Block) -> bool:
        """The same for a guess, which is not worth running out of device memory for."""
        try:
            self._reload(block)
        except torch.OutOfMemoryError:
            return False
        return True

    def _reload_fetched(self) -> None:
        """Send on what was read ahead from the disk and has arrived in host memory."""
        while self._fetching:
            block = self._fetching[0]()
            if _is_early(block):
                if block.state is State.FETCHING:
                    return
                arrived = block.state is State.HOST and block.resident() is None
                if arrived and not self._try_reload(block):
                    return
            self._fetching.popleft()

    def _wait_for_read(self, block: Block, ticket: Ticket) -> None:
        assert block.request is not None and block.extent is not None
        extent = block.extent
        is_here = block.request.done()
        try:
            with (
                contextlib.nullcontext()
                if is_here
                else self._common.waiting("stall", ticket.asks())
            ):
                block.settle_fetch()
        except OSError as e:
            what = f" (saved tensor {ticket.layout})"
            store = self._disk.store
            raise store.error("reading", e, extent.offset, extent.nbytes, what) from e


def _is_early(block: Block | None) -> TypeGuard[Block]:
    """Whether it was brought back, or is being, and nobody has asked for it."""
    return block is not None and block.reservation is not None
