"""Budget: a byte ledger with a hard limit. A reservation lasts as long as its object."""

from collections import deque


class Reservation:
    """``nbytes`` of a budget, given back when this object dies.

    It may die anywhere, also inside the garbage collector while the ledger is being read, so its
    death only appends to a queue; the ledger is settled by the next call that looks at it.
    """

    __slots__ = ("_returned", "nbytes")

    def __init__(self, returned: "deque[int]") -> None:
        self.nbytes = 0
        self._returned = returned

    def __del__(self) -> None:
        if hasattr(self, "_returned"):  # an interrupt may have come before
            self._returned.append(self.nbytes)


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
        self._returned: deque[int] = deque()

    @property
    def used_bytes(self) -> int:
        """Bytes reserved now."""
        while self._returned:
            self._used_bytes -= self._returned[0]
            del self._returned[0]  # not a call, after which an interrupt could come too early
        return self._used_bytes

    def reserve(self, nbytes: int, *, alone: bool = False) -> Reservation | None:
        """Reserve ``nbytes``, or return ``None`` where the limit would be passed.

        Args:
            nbytes: bytes to reserve.
            alone: admit an item larger than the whole limit when nothing else is reserved; without
                this it would wait for ever.
        """
        used = self.used_bytes
        if used + nbytes > self.limit_bytes and not (alone and used == 0):
            return None
        reservation = Reservation(self._returned)
        # No call between these two, so that an interrupt finds both done or none.
        self._used_bytes = used = used + nbytes
        reservation.nbytes = nbytes
        if used > self.peak_bytes:
            self.peak_bytes = used
        return reservation
