"""Tiers: moves blocks between memory and disk within the budgets. It decides when; blocks know how.

Bytes on their way out are bounded by ``window_bytes`` and bytes brought back early by
``prefetch_bytes``; both live in one arena. When the window is full the forward waits
(backpressure) and does not run out of memory. When anything on the way out fails, the tensor stays
where it is, or in its slot: training goes on.
"""

import contextlib
import errno
import os
import threading
import weakref
from collections import deque
from typing import NamedTuple

import torch

from offload.block import Block, State, Ticket
from offload.budget import Budget, Reservation
from offload.config import Config
from offload.engines import PAGE_BYTES, Engine, Request, Slot, open_engine
from offload.errors import StateError, StorageError
from offload.heap import Heap
from offload.lanes import CpuLane, Lane
from offload.live import LiveBytes
from offload.report import Counters
from offload.store import DiskStore, Extent
from offload.trace import Trace, now_ns


class _Transfer(NamedTuple):
    """A read or write in flight, and all that must not be reused before it has completed."""

    request: Request
    slot: Slot
    extent: Extent
    hold: Reservation | None  # of the window, for a write
    block: "weakref.ref[Block]"  # weak: the graph may be dropped meanwhile

    @property
    def is_write(self) -> bool:
        return self.hold is not None


class Tiers:
    """Device, host and disk for the blocks of one session. Every call is made under ``lock``."""

    def __init__(self, config: Config, engine: Engine | None = None) -> None:
        self.lock = threading.RLock()
        self._pid = os.getpid()
        self.trace = Trace()
        self.live = LiveBytes()
        self.counters = Counters()
        self.error: StorageError | None = None  # the first of this step
        self._config = config
        self._engine = engine if engine is not None else open_engine(config)
        self._arena = self._engine.arena(config.arena_bytes)
        self._lane: Lane = CpuLane(self._engine)
        self._store = DiskStore(self._engine, config.disk_dir, config.disk_budget)
        self._heap = Heap(config.trim_bytes)
        self._window = Budget(config.window_bytes)
        self._ahead = Budget(config.prefetch_bytes)
        self._tail: deque[weakref.ref[Block]] = deque()  # newest blocks, still on the device
        self._tail_bytes = 0  # of all in the queue, also of those that have died in it
        self._copies: deque[tuple[Block, Extent, Reservation]] = deque()
        self._writes: deque[_Transfer] = deque()
        self._reads: deque[_Transfer] = deque()
        self._guesses: list[weakref.ref[Block]] = []  # read ahead in this step

    # -- steps ------------------------------------------------------------------------------------

    def begin_step(self, counters: Counters) -> None:
        """Count into ``counters`` from now on, and try the disk again if it had failed."""
        self.counters = counters
        self.error = None
        if self.in_child:
            return
        self._tail = deque(r for r in self._tail if r() is not None)
        self._tail_bytes = sum(b.nbytes for b in (r() for r in self._tail) if b is not None)
        self._store.budget.peak_bytes = self._store.budget.used_bytes
        self._drop_guesses()

    def end_step(self) -> None:
        """Send the tail out too, as no backward is about to ask for it; note what has completed.

        Where failures are to be raised, everything in flight is seen out: a step raises its own.
        """
        if self.in_child:
            return
        self._shrink_tail(0)
        self.poll()
        self._heap.sweep(keep=0)
        if self._config.on_error == "raise":
            self._settle_all(self._writes)

    def close(self) -> None:
        """Finish what is in flight and let go of threads and file."""
        self._settle_all(self._writes)
        self._settle_all(self._reads)
        self._engine.close()

    @property
    def in_child(self) -> bool:
        """Whether this process was forked from the one that opened the tiers.

        Its memory holds neither the parent's slots nor its threads, and the file is the parent's.
        """
        return os.getpid() != self._pid

    # -- out --------------------------------------------------------------------------------------

    def admit(self, block: Block, storage: torch.UntypedStorage) -> None:
        """Take on a new block. It joins the tail; what no longer fits there starts to leave."""
        self.poll()
        self.live.track(storage)
        self._tail.append(weakref.ref(block))
        self._tail_bytes += block.nbytes
        keep_bytes = self._config.keep_last_bytes
        self._shrink_tail(max(keep_bytes, block.nbytes) if keep_bytes else 0)
        self._sample()

    def _shrink_tail(self, keep_bytes: int) -> None:
        while self._tail_bytes > keep_bytes:
            block = self._tail.popleft()()
            if block is None:
                # Its bytes were counted; which of the queue they were is not known any more.
                self._tail_bytes = sum(b.nbytes for b in (r() for r in self._tail) if b is not None)
                continue
            self._tail_bytes -= block.nbytes
            self._send_out(block)

    def _send_out(self, block: Block) -> None:
        """LIVE -> ... -> SPILLING, or leave the block where it is and count why."""
        if not block.intact():
            return  # changed since it was saved: these are not the bytes, and unpack says so
        if self.error is not None:
            self.counters.kept_bytes["error"] += block.nbytes
            return
        try:
            extent = self._store.allocate(block.nbytes)
            room = self._room(block.nbytes) if extent is not None else None
        except StorageError as e:
            self._fail(e)
            self.counters.kept_bytes["error"] += block.nbytes
            return
        if extent is None or room is None:
            self.counters.kept_bytes["budget"] += block.nbytes
            return
        slot, hold = room
        self._sample()  # here the original and its slot are both alive
        block.offload(self._lane, slot, checksum=self._config.verify)
        self._copies.append((block, extent, hold))
        self.counters.offloaded_blocks += 1
        self.counters.offloaded_bytes += block.nbytes
        self.counters.peak_disk_bytes = max(
            self.counters.peak_disk_bytes, self._store.budget.peak_bytes
        )
        self._spill_copied()

    def _spill_copied(self) -> None:
        """OFFLOADING -> SPILLING for every block whose copy out has completed."""
        while self._copies and self._copies[0][0].copied_out():
            block, extent, hold = self._copies.popleft()
            self._heap.retire(block.settle_offload())
            assert block.slot is not None
            slot = block.slot
            request = block.spill(self._store, extent)
            self._writes.append(_Transfer(request, slot, extent, hold, weakref.ref(block)))

    def _room(self, nbytes: int) -> tuple[Slot, Reservation] | None:
        """A slot within the window; waits for writes to make room. ``None``: waiting would not
        help.
        """
        started_ns = 0
        try:
            while True:
                hold = self._window.reserve(nbytes, alone=True)
                slot = self._slot(nbytes) if hold is not None else None
                if hold is not None and slot is not None:
                    return slot, hold
                del hold
                if not self._writes:
                    return None
                started_ns = started_ns or now_ns()
                self._settle_first(self._writes)
        finally:
            if started_ns:
                self._waited("backpressure_ns", started_ns)

    def _slot(self, nbytes: int) -> Slot | None:
        """A slot of the arena; what is larger than the whole arena travels alone in memory of its
        own.
        """
        # The slab may be larger than the budget: an engine rounds it up to whole pages.
        budget_bytes = self._config.arena_bytes
        padded_bytes = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
        if padded_bytes > budget_bytes:
            return self._arena.allocate_outside(nbytes)
        if self._arena.used_bytes + padded_bytes > budget_bytes:
            return None
        return self._arena.allocate(nbytes)

    def poll(self) -> None:
        """Take note of what has completed. Never waits."""
        self._spill_copied()
        self._heap.sweep()
        for transfers in (self._writes, self._reads):
            while transfers and (transfers[0].request.done() or self._cancelled(transfers[0])):
                self._settle_first(transfers)

    def _cancelled(self, transfer: _Transfer) -> bool:
        """Cancel what nobody waits for any more; False if it has begun, and has to be seen out."""
        return transfer.block() is None and transfer.request.cancel()

    def _settle_all(self, transfers: "deque[_Transfer]") -> None:
        while transfers:
            self._settle_first(transfers)

    def _settle_first(self, transfers: "deque[_Transfer]") -> None:
        """See out the oldest of ``transfers``, waiting if need be.

        It leaves the queue last: an interrupted wait must not forget what still runs.
        """
        self._cancelled(transfers[0])
        self._settle(transfers[0])
        transfers.popleft()

    def _settle(self, transfer: _Transfer) -> None:
        """Wait for a transfer, tell its block, and count it.

        A write that failed leaves its block in the slot. A read that failed leaves it on the disk:
        if it was a guess, nobody may ever ask, and whoever asks reads again.
        """
        block, request, nbytes = transfer.block(), transfer.request, transfer.extent.nbytes
        try:
            if block is None or block.request is not request:
                request.wait()
            elif transfer.is_write:
                block.settle_spill()
            else:
                block.settle_fetch()
        except OSError as e:
            if e.errno == errno.ECANCELED:
                self.counters.cancelled_bytes += nbytes
            elif transfer.is_write:
                self._fail(self._store.error("writing", e, transfer.extent.offset, nbytes))
                self.counters.kept_bytes["error"] += block.nbytes if block is not None else 0
            return
        times = (request.start_ns, request.end_ns)
        self.counters.transfers.append(times)
        if transfer.is_write:
            self.counters.written_bytes += nbytes
        else:
            self.counters.read_bytes += nbytes
        name = "write" if transfer.is_write else "read"
        self.trace.emit(name, block.id if block is not None else -1, nbytes, *times)

    # -- back -------------------------------------------------------------------------------------

    def prefetch(self, block: Block) -> bool:
        """Start bringing ``block`` back; False if there is no room for it now."""
        if not self._ahead.limit_bytes:
            return False
        hold = self._ahead.reserve(block.nbytes, alone=True)
        slot = self._slot(block.nbytes) if hold is not None else None
        if slot is None:
            return False
        self._fetch(block, slot, hold)
        self._guesses.append(weakref.ref(block))
        return True

    def _drop_guesses(self) -> None:
        """Let go of what was read ahead and never asked for: a guess ends with its step."""
        for block in (r() for r in self._guesses):
            if block is None or block.reservation is None:
                continue
            if block.request is not None and (block.request.done() or block.request.cancel()):
                with contextlib.suppress(OSError):
                    block.settle_fetch()
            if block.state is State.HOST:
                block.release_slot()
        self._guesses.clear()

    def _fetch(self, block: Block, slot: Slot, hold: Reservation | None) -> None:
        assert block.extent is not None
        extent = block.extent
        request = block.fetch(self._store, slot, urgent=hold is None, reservation=hold)
        self._reads.append(_Transfer(request, slot, extent, None, weakref.ref(block)))
        self._sample()

    def demand(self, block: Block) -> None:
        """Backward wants ``block`` now: note how near it is, and start an urgent read if need be.

        Raises:
            StateError: this is a forked child, and the bytes are in the parent's hands.
        """
        if self.in_child:
            if block.state is State.LIVE:
                return
            raise StateError(
                "this process was forked between the forward and its backward: the activations are "
                "the parent's; run forward and backward in one process"
            )
        self.poll()
        counters = self.counters
        if block.state is State.FETCHING and block.request is not None and block.request.done():
            with contextlib.suppress(OSError):  # a guess that failed: read again
                block.settle_fetch()
        if block.resident() is not None or block.state in (State.LIVE, State.SPILLING):
            counters.hits += 1
            counters.forwarded_bytes += block.nbytes
        elif block.state is State.FETCHING and block.request is not None:
            counters.lates += 1
            block.request.promote()
        elif block.state is State.HOST:
            counters.hits += 1
            counters.forwarded_bytes += block.nbytes if block.extent is None else 0
        else:
            counters.misses += 1
            slot = self._slot(block.nbytes) or self._arena.allocate_outside(block.nbytes)
            self._fetch(block, slot, None)

    def take(self, ticket: Ticket) -> torch.UntypedStorage:
        """The device storage of the ticket's demanded block, ordered before the caller's work.

        Raises:
            StorageError: the bytes could not be brought back.
        """
        block = ticket.block
        storage = block.resident()
        if storage is None:
            if block.state is State.FETCHING:
                self._wait_for_read(block, ticket)
            block.reload(self._lane)
            storage = block.resident()
            assert storage is not None
            if block.state is State.HOST and block.extent is not None:
                block.release_slot()  # on cpu the storage aliases the slot and keeps its memory
        block.serve(ticket)
        self._heap.released(block.nbytes)  # gradients of about that size come and go
        return storage

    def _wait_for_read(self, block: Block, ticket: Ticket) -> None:
        assert block.request is not None and block.extent is not None
        extent, started_ns = block.extent, 0 if block.request.done() else now_ns()
        try:
            block.settle_fetch()
        except OSError as e:
            what = f" (saved tensor {ticket.layout})"
            raise self._store.error("reading", e, extent.offset, extent.nbytes, what) from e
        finally:
            if started_ns:
                self._waited("stall_ns", started_ns)

    # -- figures ----------------------------------------------------------------------------------

    def _waited(self, counter: str, started_ns: int) -> None:
        ended_ns = now_ns()
        setattr(self.counters, counter, getattr(self.counters, counter) + ended_ns - started_ns)
        self.counters.waits.append((started_ns, ended_ns))
        self.trace.emit(counter.removesuffix("_ns"), -1, 0, started_ns, ended_ns)

    def _sample(self) -> None:
        held = self._arena.used_bytes + self._arena.outside_bytes
        counters = self.counters
        counters.peak_arena_bytes = max(counters.peak_arena_bytes, held)
        counters.peak_live_bytes = max(counters.peak_live_bytes, held + self.live.alive_bytes)

    def _fail(self, error: StorageError) -> None:
        """Note the step's first failure of the disk; nothing more is sent out until the next."""
        if self.error is None:
            # Kept without its traceback, whose frames hold blocks and reservations.
            self.error = error.with_traceback(None)
            self.counters.warnings[
                f"{error}. Tensors stay in memory for the rest of this step"
            ] += 1
