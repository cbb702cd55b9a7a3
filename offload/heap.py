"""Heap: makes the C library give back the memory that offloading freed.

glibc keeps freed memory for the next allocation, but before 2.38 it cannot reuse a freed block for
an aligned request of the same size, which is what every tensor is. A tensor that leaves in the
middle of a forward leaves a hole that the next one does not fit into: the process keeps growing
although its tensors do not. Two remedies, the second for what the first cannot see (gradients that
come and go in backward):

- the pages of a storage that has left are offered to the system just before its last owner, which
  is this module, lets go of it. The system takes them when memory runs short, and until then they
  can be used again at no cost (``MADV_FREE``);
- if asked to, it also makes the process small at once, whether memory is short or not: the pages
  are returned then and there, and once the process has grown by a given amount ``malloc_trim``
  returns those of all holes. Every page has to be faulted in again when it is used again, which
  costs more than the offloading itself.
"""

import ctypes
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import psutil
import torch

_LOOK_EVERY_BYTES = 16 << 20  # let go between two looks at the size of the process
_MAX_RETIRED = 8  # storages that wait for their other owners
_MIN_BYTES = 64 << 10  # smaller ones are not worth the calls
_MADV_DONTNEED, _MADV_FREE = 4, 8


def _library_call(name: str, *argtypes: Any) -> Callable[..., int] | None:
    if sys.platform != "linux":
        return None
    try:
        call = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):  # another C library keeps its heap in another way
        return None
    call.argtypes = list(argtypes)
    call.restype = ctypes.c_int
    return call  # type: ignore[no-any-return]


class Heap:
    """Gives up the pages of retired storages, and trims the heap whenever the process has grown by
    ``trim_bytes`` over its smallest size since.

    Args:
        trim_bytes: growth of the resident memory that is let pass; 0 trims never, and offers pages
            instead of returning them.

    Example:
        >>> heap = Heap(64 << 20)
        >>> heap.released(1 << 20)
        >>> heap.trims
        0
    """

    def __init__(self, trim_bytes: int) -> None:
        self.trims = 0
        self.returned_bytes = 0  # of storages whose pages were returned or offered
        self._trim_bytes = trim_bytes
        self._released_bytes = 0
        self._retired: deque[torch.UntypedStorage] = deque()
        self._process = psutil.Process()
        self._smallest_bytes = self._resident_bytes()
        self._advice = _MADV_DONTNEED if trim_bytes else _MADV_FREE
        self._advise = _library_call("madvise", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._trim = _library_call("malloc_trim", ctypes.c_size_t) if trim_bytes else None

    def retire(self, storage: torch.UntypedStorage) -> None:
        """Let go of a storage that was copied elsewhere, at the first ``sweep`` that finds nobody
        else to have it.

        The forward often still has it for an operation or two; where it is held for longer than the
        next few storages, it is left to whoever does.
        """
        if self._advise is not None and _is_worth_returning(storage):
            self._retired.append(storage)
            self._forget(_MAX_RETIRED)
        self.released(storage.nbytes())

    def sweep(self, keep: int = _MAX_RETIRED) -> None:
        """Return the pages of every retired storage that nobody else has; ``keep`` may still
        wait.
        """
        for _ in range(len(self._retired)):
            storage = self._retired.popleft()
            # Its owners in C++ (tensors, graphs) count as uses, those in Python as references: to
            # the name here and to the argument.
            if torch._C._storage_Use_Count(storage._cdata) != 1 or sys.getrefcount(storage) != 2:
                self._retired.append(storage)
            # Whoever has a weak reference (another session, the user) could bring it back to life
            # meanwhile: then it is only let go. The one that is allowed is our own account's.
            elif weakref.getweakrefcount(storage) <= 1:
                self._return_pages(storage)
        self._forget(keep)

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

    def _forget(self, keep: int) -> None:
        while len(self._retired) > keep:
            self._retired.popleft()

    def _return_pages(self, storage: torch.UntypedStorage) -> None:
        start = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (storage.data_ptr() + storage.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and self._advise is not None:
            self._advise(start, end - start, self._advice)
            self.returned_bytes += end - start

    def _resident_bytes(self) -> int:
        return int(self._process.memory_info().rss)


def _is_worth_returning(storage: torch.UntypedStorage) -> bool:
    """Whether it is large and torch's ordinary allocator made it.

    Memory that belongs to somebody else (NumPy, a file) cannot be resized; pages that a device has
    pinned must not move.
    """
    return (
        storage.nbytes() >= _MIN_BYTES
        and storage.device.type == "cpu"
        and storage.resizable()
        and not storage.is_shared()
        and not storage.is_pinned()
    )
