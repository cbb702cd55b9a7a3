"""Block: the bytes of one storage, and where they are.

    state        host slot     disk extent    leaves by
    LIVE         (bundle)                     offload -> OFFLOADING; write_through -> DISK
    OFFLOADING   being filled                 settle_offload -> HOST, or LIVE if it was resized
    HOST         x             (x)            spill -> SPILLING; release_slot -> DISK
    SPILLING     x             being filled   settle_spill -> DISK, or HOST if the write failed
    DISK                       x              fetch -> FETCHING
    FETCHING     being filled  x              settle_fetch -> HOST, or DISK if the read failed

The state names the copy that lasts. (x): held if the bytes came from there. (bundle): where the
device's memory is host memory, small storages are gathered in the slot that they leave by
(``offload.hooks.bundles``). HOST means that the device may let go of the original; on an
accelerator the last of the copy may still be on its way, and ``copied`` tells. The device storage
stands beside the state: LIVE and OFFLOADING hold the original; later ``reload`` makes a copy that
is shared by all tickets until each has been served, and known weakly for as long as anybody else
holds it.

One method is one transition. It opens with the states it accepts and sets the new state last.

[Note: ownership is lifetime] Nobody frees a block. Autograd holds tickets, tickets hold the block,
the block holds its slot, its extent and its device storage, and each of those returns what it
stands for when it dies. A dropped graph, an exception or a retained graph needs no code here. What
is in flight is held by whoever watches the request as well, so that neither memory nor disk space
is used again under a running transfer.
"""

import itertools
import weakref
from enum import Enum, auto
from typing import Protocol

import torch

from offload.blocks.placement import Placement
from offload.engines import Request, Slot, padded
from offload.engines.budget import Reservation
from offload.engines.store import DiskStore, Extent
from offload.errors import StateError
from offload.lanes import DONE, Fence, Lane
from offload.report.trace import Subject
from offload.tensors.weak import StorageRef, VersionWitness


class State(Enum):
    """Where the bytes are; the table above is the definition."""

    LIVE = auto()
    OFFLOADING = auto()
    HOST = auto()
    SPILLING = auto()
    DISK = auto()
    FETCHING = auto()


_block_ids = itertools.count()
_FEW_TICKETS = 16


class Claim(Protocol):
    """What a block knows of a ticket for it."""

    served: int  # the block's generation that it was last served from

    def asks(self) -> Subject:
        """``Block.subject``, with what of backward asks for it now."""


class Block:
    """The bytes of one storage at one version. Every method is called under the tiers' lock."""

    __slots__ = (
        "__weakref__",
        "_arrived",
        "_device",
        "_device_ref",
        "_origin",
        "_prune_at",
        "_served",
        "_source_address",
        "checksum",
        "copied",
        "device",
        "extent",
        "foreign",
        "generation",
        "id",
        "nbytes",
        "padded_bytes",
        "placement",
        "produced",
        "request",
        "reservation",
        "segment",
        "slot",
        "state",
        "subject",
        "tickets",
        "window_bytes",
        "witness",
    )

    def __init__(
        self,
        storage: torch.UntypedStorage,
        witness: VersionWitness,
        placement: Placement,
        module: str = "",
    ) -> None:
        self.id = next(_block_ids)
        self.nbytes = storage.nbytes()
        self.padded_bytes = padded(self.nbytes)  # of its slot
        self.window_bytes = self.nbytes  # what it takes of a window: perhaps its slot
        self.device = storage.device
        self.placement = placement
        self.produced: object = None  # what the lane said when it was saved
        self.subject = Subject(self.id, module)  # what an event of this block is about
        self.segment = -1  # of a plan, whose forward saved it
        self.foreign = False  # made by no operation of the graph: a batch of data, for instance
        self.state = State.LIVE
        self.witness = witness
        self.tickets: list[weakref.ref[Claim]] = []
        self._served = 0  # of those, from the first: dead, or served from this generation
        self._prune_at = _FEW_TICKETS
        self.generation = 0  # counts reloads
        self.slot: Slot | None = None
        self.extent: Extent | None = None
        self.checksum: int | None = None
        self.request: Request | None = None  # of the transfer in flight
        # Of prefetched bytes that nobody has asked for yet.
        self.reservation: Reservation | None = None
        self.copied: Fence = DONE  # the copy out
        self._source_address = 0  # of that copy
        self._arrived: Fence = DONE  # the copy in
        self._device: torch.UntypedStorage | None = storage
        # Held for as long as the block lives: while it is, torch does not give the storage's
        # address to another one, so the address is a safe key. It also finds the original if
        # somebody keeps it alive.
        self._origin = StorageRef(storage)
        self._device_ref = self._origin

    # -- out --------------------------------------------------------------------------------------

    def intact(self) -> bool:
        """Whether the device still has the bytes that were saved: not modified, not resized."""
        device = self._device
        return device is not None and device.nbytes() == self.nbytes and not self.witness.modified

    def offload(self, lane: Lane, slot: Slot, *, checksum: bool) -> None:
        """LIVE -> OFFLOADING: start copying the device bytes into ``slot``."""
        if self.state is not State.LIVE:
            raise self._unexpected(State.LIVE)
        assert self._device is not None
        self.copied, self.checksum = lane.copy_out(
            slot, self._device, self.produced, checksum=checksum, about=self.subject
        )
        self.slot = slot
        self._source_address = self._device.data_ptr()
        self.state = State.OFFLOADING

    def settle_offload(self, lane: Lane) -> bool:
        """OFFLOADING -> HOST, and the original is let go of.

        -> LIVE, and False, if it was resized meanwhile: what was copied may not be what it had.
        """
        if self.state is not State.OFFLOADING:
            raise self._unexpected(State.OFFLOADING)
        original = self._device
        assert original is not None
        if original.nbytes() != self.nbytes or original.data_ptr() != self._source_address:
            self.slot, self.copied, self.checksum = None, DONE, None
            self.state = State.LIVE
            return False
        lane.let_go(original, self.copied, foreign=self.foreign)
        self._device = None
        self.state = State.HOST
        return True

    def write_through(self, extent: Extent, checksum: int | None) -> None:
        """LIVE -> DISK: its bytes were written to ``extent``, and the original is let go of."""
        if self.state is not State.LIVE:
            raise self._unexpected(State.LIVE)
        self.extent, self.checksum, self._device = extent, checksum, None
        self.state = State.DISK

    def host_slot(self, lane: Lane) -> Slot:
        """The slot, for host code that is about to read it. Waits for the copy out."""
        if self.state is not State.HOST:
            raise self._unexpected(State.HOST)
        assert self.slot is not None
        lane.host_reads(self.slot, self.copied)
        return self.slot

    def spill(self, store: DiskStore, extent: Extent) -> Request:
        """HOST -> SPILLING: start writing the slot, which ``host_slot`` gave, to ``extent``."""
        if self.state is not State.HOST:
            raise self._unexpected(State.HOST)
        assert self.slot is not None
        self.request = store.write(self.slot, extent)
        self.extent = extent
        self.state = State.SPILLING
        return self.request

    def settle_spill(self) -> None:
        """SPILLING -> DISK: the bytes are on the disk, the slot may go. Raises ``OSError`` and ->
        HOST if not.
        """
        if self.state is not State.SPILLING:
            raise self._unexpected(State.SPILLING)
        assert self.request is not None
        try:
            self.request.wait()
        except OSError:
            self.request = self.extent = None
            self.state = State.HOST
            raise
        self.request = self.slot = None
        self.state = State.DISK

    # -- back -------------------------------------------------------------------------------------

    def fetch(
        self,
        lane: Lane,
        store: DiskStore,
        slot: Slot,
        *,
        urgent: bool,
        reservation: Reservation | None,
    ) -> Request:
        """DISK -> FETCHING: start reading the extent into ``slot``."""
        if self.state is not State.DISK:
            raise self._unexpected(State.DISK)
        assert self.extent is not None
        lane.host_writes(slot)
        self.request = store.read(slot, self.extent, urgent=urgent, checksum=self.checksum)
        self.slot = slot
        self.reservation = reservation
        self.state = State.FETCHING
        return self.request

    def settle_fetch(self) -> None:
        """FETCHING -> HOST, waiting for the read. Raises ``OSError`` and -> DISK if it failed."""
        if self.state is not State.FETCHING:
            raise self._unexpected(State.FETCHING)
        assert self.request is not None
        try:
            self.request.wait()
        except OSError:
            self.request = self.slot = self.reservation = None
            self.state = State.DISK
            raise
        self.request = None
        self.state = State.HOST

    def reload(self, lane: Lane) -> torch.UntypedStorage:
        """Make a device copy of the host bytes. The state stays: it names the copy that lasts."""
        if self.state is not State.HOST and self.state is not State.SPILLING:
            raise self._unexpected(State.HOST)
        assert self.slot is not None
        self._device, self._arrived = lane.copy_in(
            self.slot, self.copied, self.device, self.subject
        )
        self._device_ref = StorageRef(self._device)
        self._begin_generation()
        return self._device

    def hold(self, storage: torch.UntypedStorage, reservation: Reservation) -> None:
        """Keep the resident storage, which somebody else may let go of, as if it was reloaded."""
        self._device, self.reservation = storage, reservation
        self._begin_generation()

    def _begin_generation(self) -> None:
        self.generation += 1
        self._served = 0
        if len(self.tickets) > 1:
            self._prune()

    def release_slot(self) -> None:
        """HOST -> DISK: the bytes came from there and are there still."""
        if self.state is not State.HOST:
            raise self._unexpected(State.HOST)
        if self.extent is None:
            raise StateError(f"block {self.id} has no other copy than its slot")
        self.slot = None
        self.state = State.DISK

    def unload(self) -> None:
        """Let go of a reloaded copy that nobody has asked for."""
        self.reservation = None
        if self.state is not State.LIVE and self.state is not State.OFFLOADING:
            self._device = None
            self._device_ref = self._origin  # it may still be arriving, for nobody
            self._arrived = DONE

    # -- use --------------------------------------------------------------------------------------

    def resident(self) -> torch.UntypedStorage | None:
        """The device storage if there is one: held here, or kept alive by somebody else. Whoever
        is going to use it asks ``serve``.

        The original goes first. Somebody may have written to it without torch's notice (NumPy, a
        normalisation to its running statistics), and backward without a session would see that.
        """
        if self.state is State.LIVE or self.state is State.OFFLOADING:
            return self._device
        # FSDP empties the storages of parameters; nothing of that kind becomes a block, but look
        # at the size anyway.
        storage = self._origin.storage()
        if storage is not None and storage.nbytes() == self.nbytes:
            return storage
        if self._device_ref is self._origin:
            return None
        storage = self._device_ref.storage()
        return storage if storage is not None and storage.nbytes() == self.nbytes else None

    @property
    def held(self) -> torch.UntypedStorage | None:
        """The storage that stays whatever others do: the original until it has left, or a copy that
        was made since and not served to all.
        """
        return self._device

    @property
    def arrived(self) -> bool:
        """Whether a reload has completed, and not only been started."""
        return self._arrived.done()

    def serve(self, lane: Lane, ticket: Claim, storage: torch.UntypedStorage) -> None:
        """Order ``storage``, which is the resident one, before the caller's work. Counts ``ticket``
        as served, and lets a reloaded copy go once every ticket has been.

        Without this, a storage that two operators saved would be read twice; with a reference held
        for as long as the block lives, a retained graph would fill the memory again.
        """
        self.reservation = None
        ticket.served = self.generation
        if self.state is State.LIVE or self.state is State.OFFLOADING:
            return  # the original is the only copy, and autograd has ordered its streams
        if storage._cdata == self._device_ref.cdata != self._origin.cdata:
            lane.before_use(storage, self._arrived, ticket.asks)
        if self._all_served():
            self._device = None

    def forget_dead(self) -> None:
        """Let a reloaded copy go that only tickets still wait for which have died since."""
        if self.generation and self.reservation is None and self._all_served():
            self._device = None

    def claim(self, ticket: Claim) -> None:
        """Count ``ticket`` among those that are to be served."""
        if len(self.tickets) >= self._prune_at:
            self._prune()
        self.tickets.append(weakref.ref(ticket))

    def _prune(self) -> None:
        """Forget dead tickets. Seldom enough to cost nothing for each of many."""
        self.tickets = [r for r in self.tickets if r() is not None]
        self._prune_at = max(_FEW_TICKETS, 2 * len(self.tickets))
        self._served = 0

    def _all_served(self) -> bool:
        """Whether no living ticket waits for this generation. It goes on where it last stopped:
        of ten thousand views of one storage each is served.
        """
        while self._served < len(self.tickets):
            ticket = self.tickets[self._served]()
            if ticket is not None and ticket.served != self.generation:
                return False
            self._served += 1
        return True

    def _unexpected(self, expected: State) -> StateError:
        return StateError(
            f"block {self.id} of {self.nbytes} bytes is {self.state.name}, expected {expected.name}"
        )
