"""The native engine: the C++ extension, put behind the engine's interface."""

import torch

from offload import _native
from offload.engines.base import Arena, Engine, Request, Slot
from offload.errors import StateError

# Bytes in flight are bounded before they come here, by the windows; this many small ones are let
# wait before the thread that trains does.
_CAPACITY = 1024


class NativeEngine(Engine):
    """O_DIRECT through huge-page memory by a few C++ threads that never need the interpreter."""

    name = "native"

    def __init__(self, directory: str, *, threads: int, block_bytes: int) -> None:
        file = _native.File(directory)
        self._file: _native.File | None = file
        self._queue: _native.Queue | None = _native.Queue(
            file, threads=threads, block_bytes=block_bytes, capacity=_CAPACITY
        )

    def arena(self, capacity_bytes: int) -> Arena:
        # Not prefaulted: the lowest free memory is used first, so a session that needs little
        # touches little.
        return _native.Arena(capacity_bytes, prefault=False)

    def copy(self, slot: Slot, storage: torch.UntypedStorage, *, checksum: bool) -> int | None:
        address, nbytes = storage.data_ptr(), storage.nbytes()
        if checksum:
            return _native.copy_crc32c(slot.address, address, nbytes)
        _native.copy(slot.address, address, nbytes)
        return None

    def checksum(self, slot: Slot) -> int:
        return _native.crc32c(slot.address, slot.nbytes)

    def alias(self, slot: Slot) -> torch.UntypedStorage:
        return torch.frombuffer(slot, dtype=torch.uint8).untyped_storage()

    def reserve(self, end_bytes: int) -> None:
        if self._file is None:
            raise _closed()
        self._file.reserve(end_bytes)

    def write(self, slot: Slot, offset: int) -> Request:
        if self._queue is None:
            raise _closed()
        return self._queue.write(slot, offset)  # type: ignore[arg-type]  # a slot of our arena

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        if self._queue is None:
            raise _closed()
        return self._queue.read(slot, offset, urgent=urgent, crc=checksum)  # type: ignore[arg-type]

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._queue = self._file = None  # the descriptor and its disk space go with them


def _closed() -> StateError:
    return StateError("the engine is closed")
