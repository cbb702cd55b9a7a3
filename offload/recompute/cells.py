"""Cells: results of a region's operations, kept or offloaded until its recomputation wants them.

[Note: what a cell may be used for] A recomputation may take a result from its cell only if it goes
on as the forward did. Three things could prevent that. The result was modified in place since: then
the operation runs again. A product of three-dimensional matrices returns ``_unsafe_view`` of its
result, which shares the bytes and not the version counter: so the versions of such aliases are
looked at as well, and inside the region what is written to. The operation drew random numbers: then
the generator is put where it was after the operation, or what is drawn next would differ.

[Note: results leave one operation late] What is modified in place mostly is so at once, by the
rectifier after a convolution. So a result is handed to the hooks when the next one comes, or the
region ends, and what has been modified by then is not copied for nothing.

[Note: a recomputation ends early] With the last tensor that backward needs, and it asks for no
result after that. So those are not held: where a block's last product is the next one's input, its
bytes would stay through two backwards. Without ``early_stop`` these operations run again.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offload.hooks.pack import Hooks, is_of_checkpoint
from offload.tensors.live import HookPair, storage_of
from offload.tensors.weak import VersionWitness

__all__ = ["Cells", "Draw", "random_state"]


class Draw(NamedTuple):
    """What an operation did to the generator of random numbers."""

    device: torch.device
    before: Tensor
    after: Tensor

    @classmethod
    def of(cls, device: torch.device, before: Tensor) -> Draw | None:
        """``None`` if it has drawn nothing since the state was ``before``."""
        after = random_state(device)
        return None if torch.equal(before, after) else cls(device, before, after)

    def repeat(self) -> None:
        """Move the generator as the operation did, if it is where that found it; without
        ``preserve_rng_state`` it is not, and belongs to others.
        """
        if torch.equal(random_state(self.device), self.before):
            if self.device.type == "cpu":
                torch.set_rng_state(self.after)
            else:
                torch.get_device_module(self.device).set_rng_state(self.after, self.device)


def random_state(device: torch.device) -> Tensor:
    """The state of the device's generator."""
    if device.type == "cpu":
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


class Call:
    """One operation's result, as it is held for the recomputation."""

    __slots__ = ("_draw", "_held", "_spec", "_witnesses")

    def __init__(self, result: object, draw: Draw | None) -> None:
        leaves, spec = [result], None
        if not isinstance(result, Tensor):
            leaves, spec = pytree.tree_flatten(result)
        self._spec = spec
        self._draw = draw
        with _shared_versions():
            self._witnesses = [
                VersionWitness(leaf)
                for leaf in leaves
                if isinstance(leaf, Tensor) and storage_of(leaf) is not None
            ]
            self._held: list[Any] | None = [
                _Held(leaf.detach(), None) if isinstance(leaf, Tensor) else leaf for leaf in leaves
            ]

    def offload(self, pair: HookPair) -> None:
        """Give its tensors to the hooks."""
        if self.usable and self._held is not None:
            pack, unpack = pair
            with _shared_versions():
                self._held = [
                    _Held(pack(h.packed), unpack) if isinstance(h, _Held) else h for h in self._held
                ]

    def also(self, alias: Tensor) -> None:
        """``alias`` shares bytes with the result, but not its version."""
        with _shared_versions():
            self._witnesses.append(VersionWitness(alias))

    def drop(self) -> None:
        """Let go of the result: the operation is to run again."""
        self._held = None
        self._witnesses.clear()

    @property
    def usable(self) -> bool:
        """See Note: what a cell may be used for. What is not is let go of."""
        if self._held is not None and any(w.modified for w in self._witnesses):
            self.drop()
        return self._held is not None

    @property
    def packed(self) -> list[object]:
        """What the hooks made of its tensors."""
        return [h.packed for h in self._held or () if isinstance(h, _Held)]

    def result(self) -> Any:
        """The result once more, in tensors that were not handed out before."""
        assert self._held is not None
        if self._draw is not None:
            self._draw.repeat()
        leaves = [h.tensor() if isinstance(h, _Held) else h for h in self._held]
        return leaves[0] if self._spec is None else pytree.tree_unflatten(leaves, self._spec)


class _Held(NamedTuple):
    packed: Any
    unpack: Callable[[Any], Tensor] | None  # None: it is the tensor

    def tensor(self) -> Tensor:
        # Detached, as autograd makes it the result of an operation, and owns it from then on.
        tensor: Tensor = self.packed if self.unpack is None else self.unpack(self.packed)
        return tensor.detach()


class Cells:
    """The calls of one region, in the order they were made.

    Offloading is what the saved-tensor hooks around the region do with a tensor: a session's, or
    others. Without hooks, and inside another region (whose hooks count what they are given), it is
    the same as keeping.
    """

    def __init__(self) -> None:
        pair: HookPair | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if is_of_checkpoint(pair):
            pair = None
        self._pair = pair
        owner = getattr(pair[1], "__self__", None) if pair is not None else None
        self._hooks = owner if isinstance(owner, Hooks) else None
        # The inputs of the region are saved under this number, and what is saved later under the
        # same comes after them: they will all be wanted there, in this order.
        self._node = torch._C._autograd._get_sequence_nr() - 1
        self._calls: dict[Any, list[Call | None]] = {}  # by operation
        self._ordered: list[Call] = []
        self._wanted: int | None = None  # of those, the ones before the last tensor that was saved
        self._leaving: Call | None = None  # see Note: results leave one operation late
        self._owners: defaultdict[int, list[Call]] = defaultdict(list)  # by storage

    def counted(self, pair: HookPair) -> HookPair:
        """``pair``, checkpoint's for this region; see Note: a recomputation ends early."""
        pack, unpack = pair
        self._wanted = 0

        @functools.wraps(pack)  # with all that it is known by
        def counting(tensor: Tensor) -> object:
            self._wanted = len(self._ordered)
            return pack(tensor)

        return counting, unpack

    def add(self, operation: Any, result: object, draw: Draw | None, *, offload: bool) -> None:
        """Hold a result for the recomputation."""
        call = Call(result, draw)
        if offload:
            self._offload(call)
        self._calls.setdefault(operation, []).append(call)
        self._ordered.append(call)
        for leaf in pytree.tree_leaves(result):
            storage = storage_of(leaf) if isinstance(leaf, Tensor) else None
            if storage is not None:
                self._owners[storage._cdata].append(call)

    def skip(self, operation: Any) -> None:
        """This call is to be made again."""
        self._calls.setdefault(operation, []).append(None)

    def written(self, tensor: object) -> None:
        """An operation has modified ``tensor`` in place."""
        for call in self._owners_of(tensor):
            call.drop()

    def aliased(self, tensor: object, alias: Tensor) -> None:
        """``alias`` shares the bytes of ``tensor`` and not its version counter."""
        for call in self._owners_of(tensor):
            call.also(alias)

    def _owners_of(self, tensor: object) -> list[Call]:
        storage = storage_of(tensor) if self._owners and isinstance(tensor, Tensor) else None
        return self._owners.get(storage._cdata, []) if storage is not None else []

    def close(self) -> None:
        """The forward is over."""
        if self._wanted is not None:
            for call in self._ordered[self._wanted :]:
                call.drop()
        self._offload(None)
        self._owners.clear()  # addresses of storages that may die now
        self._ordered = [c for c in self._ordered if c.usable]  # what is not lets go of its memory

    def recall(self) -> None:
        """The recomputation is about to begin: start bringing everything back."""
        if self._hooks is not None:
            self._hooks.recall([p for call in self._ordered if call.usable for p in call.packed])

    def find(self, operation: Any, index: int) -> Call | None:
        """The cell of the operation's call with this number, if it may be used."""
        calls = self._calls.get(operation)
        if calls is None or index >= len(calls):
            return None
        call = calls[index]
        return call if call is not None and call.usable else None

    def _offload(self, call: Call | None) -> None:
        """Let the last one go, and this one next."""
        leaving, self._leaving = self._leaving, call
        if leaving is None or self._pair is None:
            return
        if self._hooks is None:
            leaving.offload(self._pair)
            return
        with self._hooks.numbered(self._node):
            leaving.offload(self._pair)


def _shared_versions() -> Any:
    """Inside, ``detach`` shares the version counter; in a dispatch mode it otherwise does not."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)
