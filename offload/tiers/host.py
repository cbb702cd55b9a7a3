"""HostTier: the host memory of a session, in slabs that are pinned for an accelerator."""

import weakref

from offload.engines import PAGE_BYTES, Arena, Engine, Slot, padded
from offload.errors import warn_user
from offload.lanes import Pinner
from offload.units import format_bytes

# Pinning takes about as long as filling the memory; what is never needed is never pinned.
_GROWTH_BYTES = 1 << 30


class HostTier:
    """Slots within a hard budget of bytes.

    Args:
        engine: makes the slabs.
        budget_bytes: most bytes of slots alive at one time; of slots larger than that there is one
            at a time, in memory of its own.
        pinner: pins every slab; the memory then grows with need. Without one there is a single
            slab, which costs nothing until it is touched.
    """

    def __init__(self, engine: Engine, budget_bytes: int, pinner: Pinner | None) -> None:
        self._engine = engine
        self._budget_bytes = budget_bytes
        self._pinner = pinner
        self._slabs: list[Arena] = []
        self._capacity_bytes = 0  # of all of them
        self._pinned: list[int] = []  # addresses
        # A graph that outlives its session keeps the tier; what is pinned goes with the last.
        self._unpin = weakref.finalize(self, _unpin_all, pinner, self._pinned)
        self._unpin.atexit = False  # the driver cleans up after the process
        if pinner is None:
            self._add(engine.arena(budget_bytes))

    @property
    def used_bytes(self) -> int:
        """Bytes of slots within the budget."""
        return sum(slab.used_bytes for slab in self._slabs)

    @property
    def outside_bytes(self) -> int:
        """Bytes of slots with a mapping of their own."""
        return sum(slab.outside_bytes for slab in self._slabs)

    @property
    def held_bytes(self) -> int:
        """Bytes of all slots."""
        held_bytes = 0  # sum() takes three times as long, and this is asked thrice a tensor
        for slab in self._slabs:
            held_bytes += slab.held_bytes
        return held_bytes

    @property
    def free_bytes(self) -> int:
        """What is left of the budget, though perhaps in pieces."""
        return self._budget_bytes - self.used_bytes

    def slot(self, nbytes: int) -> Slot | None:
        """A slot, or ``None`` where there is no room now."""
        padded_bytes = padded(nbytes)
        if padded_bytes > self._budget_bytes:
            return self.slot_outside(nbytes) if self.outside_bytes == 0 else None
        # A slab may be larger than the budget: an engine rounds it up to whole pages.
        is_larger = self._capacity_bytes > self._budget_bytes
        if is_larger and self.used_bytes + padded_bytes > self._budget_bytes:
            return None
        for slab in self._slabs:
            slot = slab.allocate(nbytes) if padded_bytes <= slab.capacity_bytes else None
            if slot is not None:
                return slot
        return self._grow(padded_bytes).allocate(nbytes) if self._may_grow(padded_bytes) else None

    def slot_outside(self, nbytes: int) -> Slot:
        """A slot with a mapping of its own, for what cannot wait or never fits."""
        if not self._slabs:
            self._grow(PAGE_BYTES)
        return self._slabs[0].allocate_outside(nbytes)

    def trim(self, keep_bytes: int) -> None:
        """Give what is free beyond the first ``keep_bytes`` back to the system, unless it is
        pinned.
        """
        if self._pinner is None:
            for slab in self._slabs:
                slab.trim(keep_bytes)

    def close(self) -> None:
        """Unpin. Nothing may be copying any more."""
        self._unpin()

    def _may_grow(self, padded_bytes: int) -> bool:
        room_bytes = self._budget_bytes - self._capacity_bytes
        return self._pinner is not None and padded_bytes <= room_bytes

    def _grow(self, padded_bytes: int) -> Arena:
        left_bytes = self._budget_bytes - self._capacity_bytes
        slab = self._engine.arena(max(padded_bytes, min(_GROWTH_BYTES, left_bytes)))
        self._add(slab)
        self._pin(slab)
        return slab

    def _add(self, slab: Arena) -> None:
        self._slabs.append(slab)
        self._capacity_bytes += slab.capacity_bytes

    def _pin(self, slab: Arena) -> None:
        if self._pinner is None:
            return
        first = slab.allocate(PAGE_BYTES)  # the slab is empty: at its start
        assert first is not None
        # A slab that was rounded up over the budget is pinned as far as the budget goes.
        nbytes = min(slab.capacity_bytes, self._budget_bytes)
        try:
            self._pinner.pin(first.address, nbytes)
        except RuntimeError as e:
            warn_user(
                f"the driver refused to pin {format_bytes(nbytes)} of host memory ({e}): copies "
                "will not overlap with the computation; lower host_budget or raise ulimit -l"
            )
        else:
            self._pinned.append(first.address)


def _unpin_all(pinner: Pinner | None, addresses: list[int]) -> None:
    if pinner is not None and addresses:
        for address in addresses:
            pinner.unpin(address)
        addresses.clear()
