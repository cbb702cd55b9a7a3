"""Observer: what the segments of a running model save, and how much memory that takes meanwhile.

On an accelerator the allocator knows the peak of a segment. On the cpu the session's own accounts
do: what is saved, and the slots that it passes through.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from offload.engines import padded
from offload.hooks.kinds import is_never_moved
from offload.hooks.pack import Hooks
from offload.planner.record import Pass, StorageIds, Visit
from offload.recompute.selective import Selected
from offload.tensors.live import hooks_below, storage_of
from offload.tiers import Tiers

__all__ = ["Observer", "missing_gradients"]

_sequence_nr = torch._C._autograd._get_sequence_nr


class Observer:
    """Writes into passes and visits.

    Args:
        hooks, tiers: of the session.
    """

    def __init__(self, hooks: Hooks, tiers: Tiers) -> None:
        self.is_cpu = tiers.common.lane.host_is_device
        self._hooks = hooks
        self._tiers = tiers
        self._ids = StorageIds()

    def inside(self, visit: Visit, again: bool) -> saved_tensors_hooks:
        """Sees what is saved inside of a region, in its forward or when it is computed ``again``;
        the session's hooks see only what is held of it.
        """
        pack_below, unpack_below = hooks_below()

        @wraps(pack_below)
        def pack(tensor: Tensor) -> Any:
            storage = storage_of(tensor)
            if storage is not None and not is_never_moved(tensor, storage.nbytes()):
                if again:
                    self._tiers.count(storage)
                elif storage._cdata not in self._hooks.held:
                    # The operation that saves has taken its number: the last one given out.
                    visit.note_saved(self._ids.of(storage), storage.nbytes(), _sequence_nr() - 1)
            return pack_below(tensor)

        return saved_tensors_hooks(pack, unpack_below)

    def selected(self, visit: Visit) -> Selected:
        """Sees what a selective region would hold of the region that runs."""

        def note(tensor: Tensor) -> None:
            storage = storage_of(tensor)
            if storage is not None:
                visit.selected[self._ids.of(storage)] = storage.nbytes()

        return Selected(note)

    def note_collected(self, visits: Iterable[Visit]) -> None:
        """Of what selective regions would hold, what is alive though they are past."""
        for visit in visits if self.is_cpu else ():  # else what is being copied would seem to be
            visit.collected.update(self.living(visit.selected))

    def note_held(self, current: Pass, storage: torch.UntypedStorage) -> None:
        """The session is about to take, or leave, what is saved."""
        visit, saved = current.open, current.after.saved
        if storage._cdata in self._hooks.held:
            # There from the beginning. An accelerator's allocator has counted it by then; counting
            # it from here on as well is room for what is not foreseen.
            if self.is_cpu:
                saved = (visit.before if visit is not None else current.after).held
        elif visit is not None:
            saved = visit.held
            if visit.action == "disk" and self.is_cpu:
                self._note_passing(visit, storage)
        else:
            current.after.lingering.update(self.lingering(current))
            self.note_collected(current.visits[:-1])
        saved.setdefault(self._ids.of(storage), storage.nbytes())

    def _note_passing(self, visit: Visit, storage: torch.UntypedStorage) -> None:
        """With ``storage``, and its slot while it is copied there; without what is on its way out,
        which can be waited for.
        """
        tiers = self._tiers
        if tiers.in_child:
            return
        nbytes = storage.nbytes()
        new_bytes = padded(nbytes) + (0 if tiers.live.counts(storage) else nbytes)
        with tiers.lock:
            tiers.poll()
            there_bytes = self._staying_bytes() + new_bytes - visit.start_bytes
        visit.passing_bytes = max(visit.passing_bytes, there_bytes)

    # -- peaks ------------------------------------------------------------------------------------

    def lingering(self, current: Pass) -> dict[int, int]:
        """Of all that the pass has saved, also to compute it again, what somebody else holds.

        On an accelerator what is still being copied would seem to be held.
        """
        if not self.is_cpu:
            return {}
        least = self._tiers.common.config.min_offload_bytes
        return self.living({k: n for k, n in current.saved.items() if n >= least})

    def living(self, storages: dict[int, int]) -> dict[int, int]:
        """Those that are alive."""
        living = self._ids.living()
        return {k: n for k, n in storages.items() if k in living}

    def begin_peak(self, visit: Visit) -> None:
        """Of the visit's forward, or of its backward."""
        tiers = self._tiers
        if not self.is_cpu:
            torch.accelerator.reset_peak_memory_stats()
            visit.start_bytes = torch.accelerator.memory_allocated()
        elif not tiers.in_child:
            with tiers.lock:
                visit.start_bytes = self._staying_bytes()

    def _staying_bytes(self) -> int:
        return self._tiers.gate.used_bytes - self._tiers.outbound.leaving_bytes

    def staying_bytes(self) -> int:
        """In use, without what is on its way out, or has come early; on the cpu."""
        tiers = self._tiers
        with tiers.lock:
            tiers.poll()
            return self._staying_bytes() - sum(nbytes for _, nbytes in tiers.inbound.early())

    def end_forward(self, visit: Visit) -> None:
        """Note the peak of the allocator."""
        if not self.is_cpu:
            visit.forward_peak_bytes = _peak_above(visit.start_bytes)

    def end_backward(self, visit: Visit) -> None:
        """Note the peak of the allocator."""
        if not self.is_cpu:
            visit.backward_peak_bytes = _peak_above(visit.start_bytes)


def _peak_above(start_bytes: int) -> int:
    return max(0, torch.accelerator.max_memory_allocated() - start_bytes)


def missing_gradients(module: nn.Module | None) -> int:
    """Bytes that the gradients of its parameters will take, where there are none yet."""
    parameters = module.parameters() if module is not None else ()
    return sum(p.nbytes for p in parameters if p.requires_grad and p.grad is None)
