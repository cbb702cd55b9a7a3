"""Registry: finds the block of a storage at a version, for as long as that block lives.

What ``weakref.WeakValueDictionary`` does, in a quarter of the time: a death only appends, in C, and
is taken note of when the next block is added.
"""

import weakref
from collections import deque

from offload.block import Block

Key = tuple[int, int]  # ``_cdata`` of the storage, version


class _Known(weakref.ref[Block]):
    """A weak reference that remembers where it stands; it is also its own death notice."""

    __slots__ = ("key",)

    key: Key


class Registry:
    """The living blocks of a session."""

    def __init__(self) -> None:
        self._known: dict[Key, _Known] = {}
        self._dead: deque[_Known] = deque()

    def find(self, key: Key) -> Block | None:
        """The block that was added under ``key``, if it is alive."""
        known = self._known.get(key)
        return known() if known is not None else None

    def add(self, key: Key, block: Block) -> None:
        """``block`` is found under ``key`` from now on."""
        self._forget_dead()
        known = _Known(block, self._dead.append)
        known.key = key
        self._known[key] = known

    def __len__(self) -> int:
        self._forget_dead()
        return len(self._known)

    def _forget_dead(self) -> None:
        while self._dead:
            dead = self._dead[0]
            if self._known.get(dead.key) is dead:  # or another has taken its place
                del self._known[dead.key]
            del self._dead[0]  # last: an interrupt may have come before
