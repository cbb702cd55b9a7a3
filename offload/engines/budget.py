"""Budget: a byte ledger with a hard limit. A reservation lasts as long as its object."""

import weakref
from collections import deque

# Storages on their way out, or brought back early, at one time whatever the window: while one is
# copied another is written, and while one is wanted another is read.
LEAST_MOVING = 2


def has_room(used_bytes: float, nbytes: float, limit_bytes: float, least: int) -> bool:
    """Whether ``nbytes`` more are admitted: within the limit, or as one of at most ``least`` items
    of that size.
    """
    return used_bytes + nbytes <= max(limit_bytes, least * nbytes)


class Reservation:
    """``nbytes`` of a budget, given back when this object dies.

    It may die anywhere, also inside the garbage collector while the ledger is being read, so its
    death is only noted; the ledger is settled by the next call that looks at it.
    """

    __slots__ = ("__weakref__", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class _Reserved(weakref.ref[Reservation]):
    """What a reservation stands for; it is also its own death notice. See ``freelist`` for why it
    is not ``__del__`` that tells.
    """

    __slots__ = ("nbytes",)

    nbytes: int


class Budget:
    """Bytes that may be in use at one time, and the most that ever were.

    Example:
        >>> window = Budget(100)
        >>> first = window.reserve(80)
        >>> window.reserve(80) is None
        True
        >>> del first
        >>> window.used_bytes, window.peak_bytes
        (0, 80)
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._used_bytes = 0
        self._reserved: dict[int, _Reserved] = {}
        self._returned: deque[_Reserved] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        while self._returned:
            returned = self._returned[0]
            key = id(returned)
            # No call from here on, so that an interrupt finds all done or none.
            if key in self._reserved:  # else one came before
                self._used_bytes -= returned.nbytes
                del self._reserved[key]
            del self._returned[0]
        return self._used_bytes

    def reserve(self, nbytes: int, *, least: int = 0) -> Reservation | None:
        """Reserve ``nbytes``, or return ``None`` where the limit would be passed.

        Args:
            nbytes: bytes to reserve.
            least: so many of its size may be there at one time whatever the limit; with none, an
                item larger than the limit would wait for ever.
        """
        used = self.used_bytes
        if not has_room(used, nbytes, self.limit_bytes, least):
            return None
        reservation = Reservation(nbytes)
        reserved = _Reserved(reservation, self._returned.append)
        key = id(reserved)
        # No call from here on, either.
        reserved.nbytes = nbytes
        self._reserved[key] = reserved
        self._used_bytes = used = used + nbytes
        if used > self.peak_bytes:
            self.peak_bytes = used
        return reservation
