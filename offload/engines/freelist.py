"""FreeList: which ranges of one linear space are free. First fit, lowest first, merged."""

import weakref
from bisect import bisect_left
from collections import deque


class _Lent(weakref.ref[object]):
    """A range, by whoever has it; it is also its own death notice.

    A callback in C, not ``__del__``: an interrupt would come at the first line of that, as the
    first code of Python after a long operation, and Python drops what is raised there.
    """

    __slots__ = ("nbytes", "offset")

    nbytes: int
    offset: int


class FreeList:
    """Ranges of ``[0, size_bytes)`` handed out and taken back; ``grow`` moves the end.

    The lowest range that fits is taken, so that the space in use stays compact: pages (of memory)
    and blocks (of a file) that were touched once are used again before new ones are.

    An interrupt (Ctrl-C) comes where a call is made or a loop goes back; there is none of that in
    between where a range changes hands, and so each is on one side.

    Example:
        >>> free = FreeList(100)
        >>> free.take(60), free.take(60)
        (0, None)
        >>> free.give(0, 60)
        >>> free.take(100)
        0
    """

    def __init__(self, size_bytes: int = 0) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._offsets = [0] if size_bytes else []  # sorted; _lengths runs beside it
        self._lengths = [size_bytes] if size_bytes else []
        self._lent: dict[int, _Lent] = {}
        self._returned: deque[_Lent] = deque()

    def take(self, nbytes: int, owner: object = None) -> int | None:
        """The offset of ``nbytes`` now in use, or ``None`` where no free range is that long.

        Args:
            nbytes: how many.
            owner: the range is given back when it dies, which may be inside the garbage collector:
                at the next ``settle``.
        """
        lent = _Lent(owner, self._returned.append) if owner is not None else None
        key = id(lent)
        for i, length in enumerate(self._lengths):
            if length < nbytes:
                continue
            offset = self._offsets[i]
            if length == nbytes:
                del self._offsets[i], self._lengths[i]
            else:
                self._offsets[i], self._lengths[i] = offset + nbytes, length - nbytes
            self.free_bytes -= nbytes
            if lent is not None:
                lent.offset, lent.nbytes = offset, nbytes
                self._lent[key] = lent
            return offset
        return None

    def give(self, offset: int, nbytes: int) -> None:
        """Take back a range that ``take`` handed out.

        Raises:
            ValueError: some of the range is free already, or lies outside the space.
        """
        i, j, begin, end = self._merged(offset, nbytes)
        self._offsets[i:j], self._lengths[i:j] = [begin], [end - begin]
        self.free_bytes += nbytes

    def settle(self) -> None:
        """Take back what those that died have had."""
        while self._returned:
            lent = self._returned[0]
            key = id(lent)
            if key in self._lent:  # else an interrupt came before
                i, j, begin, end = self._merged(lent.offset, lent.nbytes)
                self._offsets[i:j], self._lengths[i:j] = [begin], [end - begin]
                self.free_bytes += lent.nbytes
                del self._lent[key]
            del self._returned[0]

    def _merged(self, offset: int, nbytes: int) -> tuple[int, int, int, int]:
        """Which free ranges, ``i`` to ``j``, become one with this one, and its begin and end."""
        offsets, lengths, end = self._offsets, self._lengths, offset + nbytes
        i = j = bisect_left(offsets, offset)
        before_end = offsets[i - 1] + lengths[i - 1] if i > 0 else 0
        after = offsets[i] if i < len(offsets) else self.size_bytes
        if not before_end <= offset <= end <= after:
            raise ValueError(f"range [{offset}, {end}) is not in use: given back twice?")
        if j < len(offsets) and end == after:
            end += lengths[j]
            j += 1
        if i > 0 and before_end == offset:
            i -= 1
            offset = offsets[i]
        return i, j, offset, end

    def grow(self, nbytes: int) -> None:
        """Add ``nbytes`` free bytes at the end."""
        if self.tail_bytes():
            self._lengths[-1] += nbytes
        else:
            self._offsets += [self.size_bytes]
            self._lengths += [nbytes]
        self.size_bytes += nbytes
        self.free_bytes += nbytes

    def beyond(self, offset: int) -> list[tuple[int, int]]:
        """Offset and length of what is free at ``offset`` or higher.

        Example:
            >>> FreeList(100).beyond(60)
            [(60, 40)]
        """
        ranges = zip(self._offsets, self._lengths, strict=True)
        ends = ((max(begin, offset), begin + length) for begin, length in ranges)
        return [(begin, end - begin) for begin, end in ends if begin < end]

    def tail_bytes(self) -> int:
        """Free bytes at the very end: what a request lacks to fit there is ``nbytes -
        tail_bytes()``.
        """
        if self._offsets and self._offsets[-1] + self._lengths[-1] == self.size_bytes:
            return self._lengths[-1]
        return 0
