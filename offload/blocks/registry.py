"""Registry: finds what stands for a storage at a version, for as long as that lives.

What ``weakref.WeakValueDictionary`` does, in a quarter of the time: a death only appends, in C, and
is taken note of when the next block is added.

[Note: whose version] A version is told by a counter, and one storage may have several: each result
of ``unsafe_chunk`` has its own, as has what ``Tensor.data`` gives. What is written through one of
them no other tells. A tensor shares its counter with its base and the other views of that, so the
base belongs to the key. It stands there as its weak reference, which is the same one for as long
as the tensor lives and somebody holds it; while that is held, its address is not given out again.
"""

import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

Base = weakref.ref[torch.Tensor]
Key = tuple[int, ...]
T = TypeVar("T")


def key_of(tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int) -> tuple[Key, Base]:
    """What the ``nbytes`` of ``storage`` are known by, as ``tensor`` views them now, and what is to
    be held together with the key. See Note: whose version. By addresses, never data pointers; with
    the size, as a storage may be resized.
    """
    of = tensor._base
    base = weakref.ref(tensor if of is None else of)
    return (storage._cdata, nbytes, tensor._version, id(base)), base


class _Known(weakref.ref[T]):
    """A weak reference that remembers where it stands; it is also its own death notice."""

    __slots__ = ("base", "key")

    key: Key
    base: Base | None


class Registry(Generic[T]):
    """What is alive of a session's blocks, or of the members of its bundles."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known[T]] = {}
        self._dead: deque[_Known[T]] = deque()
        self._last: set[weakref.ref[T]] = set()  # see ``when_empty``

    def find(self, key: Key) -> T | None:
        """What was added under ``key``, if it is alive."""
        known = self._known.get(key)
        return known() if known is not None else None

    def add(self, key: Key, value: T, base: Base | None = None) -> None:
        """``value`` is found under ``key`` from now on. ``base``: as ``key_of`` gave it."""
        self._forget_dead()
        known = _Known(value, self._dead.append)
        known.key = key
        known.base = base
        self._known[key] = known

    def living(self) -> list[T]:
        """What is alive now."""
        found = [known() for known in tuple(self._known.values())]
        return [value for value in found if value is not None]

    def when_empty(self, then: Callable[[], None]) -> None:
        """Call ``then`` once all that live now have died, at once if none does. It is called by the
        thread on which the last dies, perhaps inside the garbage collector. What an earlier call
        asked for is forgotten.
        """
        living = self.living()
        self._last.clear()
        self._last = last = set()

        def died(value: weakref.ref[T]) -> None:
            last.discard(value)
            if not last:
                then()

        last.update(weakref.ref(value, died) for value in living)
        if not last:
            then()

    def __len__(self) -> int:
        self._forget_dead()
        return len(self._known)

    def _forget_dead(self) -> None:
        while self._dead:
            dead = self._dead[0]
            if self._known.get(dead.key) is dead:  # or another has taken its place
                del self._known[dead.key]
            del self._dead[0]  # last: an interrupt may have come before
