"""Heap: makes the C library give back the memory that offloading freed.

glibc keeps freed memory for the next allocation, and cannot reuse a freed block for an aligned
request of the same size (before 2.38), which is what every tensor is. A tensor that leaves in the
middle of a forward therefore leaves a hole that the next one does not fit into: the process keeps
growing although its tensors do not. ``malloc_trim`` returns the pages inside such holes.
"""

import ctypes
from collections.abc import Callable


def _find_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # another C library keeps its heap in another way
        return None
    trim.argtypes = [ctypes.c_size_t]
    trim.restype = ctypes.c_int
    return trim


class Heap:
    """Trims the heap each time a number of bytes has been let go since the last time.

    Args:
        trim_bytes: that number; 0 never trims.

    Example:
        >>> heap = Heap(100)
        >>> heap.released(60), heap.released(60)
        (False, True)
    """

    def __init__(self, trim_bytes: int) -> None:
        self._trim_bytes = trim_bytes
        self._released_bytes = 0
        self._trim = _find_trim() if trim_bytes else None

    def released(self, nbytes: int) -> bool:
        """Count ``nbytes`` as let go; whether that made it trim (or would have, with glibc)."""
        self._released_bytes += nbytes
        if not self._trim_bytes or self._released_bytes < self._trim_bytes:
            return False
        self._released_bytes = 0
        if self._trim is not None:
            self._trim(0)
        return True
