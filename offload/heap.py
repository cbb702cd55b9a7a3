"""Heap: makes the C library give back the memory that offloading freed.

glibc keeps freed memory for the next allocation, but before 2.38 it cannot reuse a freed block for
an aligned request of the same size, which is what every tensor is. A tensor that leaves in the
middle of a forward leaves a hole that the next one does not fit into: the process keeps growing
although its tensors do not. ``malloc_trim`` returns the pages inside such holes. They have to be
faulted in again when they are used again, so it is called only once the process has really grown.
"""

import ctypes
from collections.abc import Callable

import psutil

_LOOK_EVERY_BYTES = 16 << 20  # let go between two looks at the size of the process


def _find_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library keeps its heap in another way
        return None
    trim.argtypes = [ctypes.c_size_t]
    trim.restype = ctypes.c_int
    return trim


class Heap:
    """Trims the heap whenever the process has grown by ``trim_bytes`` over its smallest size since.

    Args:
        trim_bytes: growth of the resident memory that is let pass; 0 never trims.

    Example:
        >>> heap = Heap(64 << 20)
        >>> heap.released(1 << 20)
        >>> heap.trims
        0
    """

    def __init__(self, trim_bytes: int) -> None:
        self.trims = 0
        self._trim_bytes = trim_bytes
        self._released_bytes = 0
        self._process = psutil.Process()
        self._smallest_bytes = self._resident_bytes()
        self._trim = _find_trim() if trim_bytes else None

    def released(self, nbytes: int) -> None:
        """Count ``nbytes`` as let go, and trim if it is time to."""
        self._released_bytes += nbytes
        if self._trim is None or self._released_bytes < _LOOK_EVERY_BYTES:
            return
        self._released_bytes = 0
        resident_bytes = self._resident_bytes()
        if resident_bytes > self._smallest_bytes + self._trim_bytes:
            self._trim(0)
            self.trims += 1
            resident_bytes = self._smallest_bytes = self._resident_bytes()
        self._smallest_bytes = min(self._smallest_bytes, resident_bytes)

    def _resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)
