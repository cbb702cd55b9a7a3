"""Kept: what a plan keeps in memory, and what of it leaves after all.

A plan keeps what there is room for by what it knows. It does not know of everything: a graph that
is still alive when the next forward begins, forwards it was not made for, a backward in another
order, what a backward saves for a backward of itself, results that the caller holds. Where there is
no room for the part that runs then, what was saved first of all that stays goes to the disk, as
backward wants it last, and comes back when it is asked for. That is slow, and keeps the budget.

Only where the device's memory is host memory: an accelerator's kept tensors are autograd's alone.
"""

from __future__ import annotations

import weakref

import torch

from offload.blocks.block import Block
from offload.blocks.placement import Placement
from offload.blocks.registry import Registry
from offload.blocks.tickets import Ticket
from offload.engines import PAGE_BYTES, padded
from offload.engines.store import Extent
from offload.report.trace import now_ns
from offload.tensors.layout import TensorLayout
from offload.tensors.weak import VersionWitness
from offload.tiers.common import Common
from offload.tiers.disk import DiskTier, Transfer

__all__ = ["Kept", "Keeping"]

_use_count = torch._C._storage_Use_Count


class Kept:
    """A saved tensor that stays. Once it had to leave, ``ticket`` stands for it."""

    __slots__ = ("__weakref__", "alias", "ticket", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.alias: torch.Tensor | None = tensor.detach()  # see Note: passing a tensor through
        self.version = tensor._version
        self.ticket: Ticket | None = None


class Keeping:
    """All that stays and may leave, oldest first. Called under the tiers' lock."""

    def __init__(self, common: Common, disk: DiskTier, blocks: Registry[Block]) -> None:
        self._common = common
        self._disk = disk
        self._blocks = blocks
        # By the address of the storage: what died with an address that was given out again is dead
        # in here as well.
        self._groups: dict[int, list[weakref.ref[Kept]]] = {}

    def add(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Kept:
        """``tensor`` stays, as long as there is room."""
        kept = Kept(tensor)
        group = self._groups.pop(storage._cdata, [])  # to the end
        if len(group) & (len(group) - 1) == 0:  # a power of two: ten thousand may be of one storage
            group = [r for r in group if r() is not None]
        group.append(weakref.ref(kept))
        self._groups[storage._cdata] = group
        return kept

    def forget_dead(self) -> None:
        """Drop what has died."""
        self._groups = {
            address: group
            for address, group in self._groups.items()
            if any(r() is not None for r in group)
        }

    def send_oldest(self) -> bool:
        """Write out the storage that was saved first; False if none dies by that."""
        for address, group in list(self._groups.items()):
            # Without what has left already, before an interrupt kept the others from it.
            kept = [k for k in (r() for r in group) if k is not None and k.alias is not None]
            if not kept:
                del self._groups[address]
            elif self._send(kept):
                del self._groups[address]
                return True
        return False

    def _send(self, group: list[Kept]) -> bool:
        """All that is kept of one storage."""
        aliases = [k.alias for k in group if k.alias is not None]
        storage = aliases[0].untyped_storage()
        if _use_count(storage._cdata) > len(aliases) + 1:  # torch's object for the storage is one
            return False  # somebody else holds it: nothing would become free
        if not storage.nbytes():
            return False  # emptied, by one who is going to fill it again
        if any(k.version != a._version for k, a in zip(group, aliases, strict=True)):
            return False  # these are not the bytes that were saved, and unpack says so
        extent = self._disk.extent(storage.nbytes()) if self._common.error is None else None
        if extent is None:
            return False
        block = Block(storage, VersionWitness(aliases[0]), Placement.DISK)
        tickets = [Ticket(block, TensorLayout.of(a), VersionWitness(a)) for a in aliases]
        try:
            with self._common.waiting("backpressure", block.subject):
                self._write(block, storage, extent)
        except OSError as e:
            self._common.fail(self._disk.store.error("writing", e, extent.offset, extent.nbytes))
            return False
        self._blocks.add((block.id, -1), block)  # of no storage that is alive
        for kept, ticket in zip(group, tickets, strict=True):
            kept.ticket = ticket
            kept.alias = None  # last: whoever asks meanwhile finds one of both
        return True

    def _write(self, block: Block, storage: torch.UntypedStorage, extent: Extent) -> None:
        """Through a slot that the budget has room for, piece by piece: there may be none for a copy
        of the whole. A checksum is of the whole.
        """
        common, nbytes, done_bytes = self._common, storage.nbytes(), 0
        while done_bytes < nbytes:
            left_bytes = nbytes - done_bytes
            if not (common.config.verify or common.gate.has_room(padded(left_bytes))):
                left_bytes = min(
                    left_bytes, max(PAGE_BYTES, common.gate.room_bytes // PAGE_BYTES * PAGE_BYTES)
                )
            slot = common.host.slot(left_bytes) or common.host.slot_outside(left_bytes)
            common.sample()
            piece = storage[done_bytes : done_bytes + left_bytes]
            checksum = common.engine.copy(slot, piece, checksum=common.config.verify)
            request = common.engine.write(slot, extent.offset + done_bytes)
            try:
                request.wait()
            finally:
                if not request.done():  # interrupted: until it is, nobody else may use the extent
                    about = weakref.ref(block), True, block.subject
                    self._disk.writes.append(Transfer(request, slot, extent, None, *about))
            done_bytes += left_bytes
            common.moved(
                "spill", padded(left_bytes), request.start_ns, now_ns(), block.subject, waited=True
            )
            del slot  # its memory is for the next piece
        counters = common.counters
        counters.written_bytes += extent.nbytes
        counters.evicted_bytes += nbytes
        counters.offloaded_bytes += nbytes
        counters.offloaded_blocks += 1
        block.write_through(extent, checksum)
