"""DiskTier: reads and writes in flight, and what their completion means to their blocks."""

import errno
import weakref
from collections import deque
from typing import NamedTuple

from offload.blocks.block import Block
from offload.engines import Request, Slot
from offload.engines.budget import Reservation
from offload.engines.store import Extent
from offload.errors import StorageError
from offload.report.trace import Subject, in_range
from offload.tiers.common import Common


class Transfer(NamedTuple):
    """A read or write in flight, and all that must not be reused before it has completed."""

    request: Request
    slot: Slot
    extent: Extent
    hold: Reservation | None  # of the window on the way out
    block: "weakref.ref[Block]"  # weak: the graph may be dropped meanwhile
    is_write: bool
    about: Subject


class DiskTier:
    """Moves blocks between host slots and the scratch file."""

    def __init__(self, common: Common) -> None:
        self.store = common.store
        self.writes: deque[Transfer] = deque()
        self.reads: deque[Transfer] = deque()
        self._common = common

    def extent(self, nbytes: int) -> Extent | None:
        """Space for ``nbytes``; ``None`` beyond the budget, or where the disk refuses (which is
        noted as the step's failure).
        """
        try:
            return self.store.allocate(nbytes)
        except StorageError as e:
            self._common.fail(e)
            return None

    def write(self, block: Block, extent: Extent, hold: Reservation | None) -> None:
        """HOST -> SPILLING."""
        common = self._common
        slot = block.host_slot(common.lane)
        if common.config.verify and block.checksum is None:  # the device copied, not we
            block.checksum = common.engine.checksum(slot)
        request = in_range("offload::spill", block.spill, self.store, extent)
        self.writes.append(
            Transfer(request, slot, extent, hold, weakref.ref(block), True, block.subject)
        )
        common.begun("spill", len(self.writes))
        if self.store.peak_bytes > common.counters.peak_disk_bytes:
            common.counters.peak_disk_bytes = self.store.peak_bytes

    def read(self, block: Block, slot: Slot, hold: Reservation | None) -> None:
        """DISK -> FETCHING; urgent if it was not foreseen (``hold`` is ``None``)."""
        assert block.extent is not None
        extent = block.extent
        request = in_range(
            "offload::fetch",
            block.fetch,
            self._common.lane,
            self.store,
            slot,
            urgent=hold is None,
            reservation=hold,
        )
        self.reads.append(
            Transfer(request, slot, extent, None, weakref.ref(block), False, block.subject)
        )
        self._common.begun("fetch", len(self.reads))
        self._common.sample()

    def poll(self) -> None:
        """Take note of what has completed. Never waits."""
        for transfers in (self.writes, self.reads):
            while transfers and (transfers[0].request.done() or _cancelled(transfers[0])):
                self._settle_oldest(transfers)

    def settle_all(self, transfers: "deque[Transfer]") -> None:
        """See out all of ``writes`` or ``reads``."""
        while transfers:
            self.settle_first(transfers)

    def settle_first(self, transfers: "deque[Transfer]") -> None:
        """See out the oldest of ``writes`` or ``reads``, waiting if need be."""
        _cancelled(transfers[0])
        self._settle_oldest(transfers)

    def _settle_oldest(self, transfers: "deque[Transfer]") -> None:
        """Wait for a transfer, tell its block, and count it.

        It leaves the queue last: an interrupted wait must not forget what still runs. A write that
        failed leaves its block in the slot. A read that failed leaves it on the disk: if it was a
        guess, nobody may ever ask, and whoever asks reads again.
        """
        transfer = transfers[0]
        block, request = transfer.block(), transfer.request
        try:
            if block is None or block.request is not request:
                request.wait()
            elif transfer.is_write:
                block.settle_spill()
            else:
                block.settle_fetch()
        except OSError as e:
            self._count_failure(transfer, e)
        else:
            nbytes, lane = transfer.extent.nbytes, "fetch"
            if transfer.is_write:
                lane = "spill"
                self._common.counters.written_bytes += nbytes
            else:
                self._common.counters.read_bytes += nbytes
            self._common.moved(
                lane, nbytes, request.start_ns, request.end_ns, transfer.about, waited=False
            )
        transfers.popleft()

    def _count_failure(self, transfer: Transfer, e: OSError) -> None:
        counters, extent, block = self._common.counters, transfer.extent, transfer.block()
        if e.errno == errno.ECANCELED:
            counters.cancelled_bytes += extent.nbytes
        elif transfer.is_write:
            self._common.fail(self.store.error("writing", e, extent.offset, extent.nbytes))
            counters.kept_bytes["error"] += block.nbytes if block is not None else 0


def _cancelled(transfer: Transfer) -> bool:
    """Cancel what nobody waits for any more; False if it has begun, and has to be seen out."""
    return transfer.block() is None and transfer.request.cancel()
