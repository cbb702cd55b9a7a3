"""The native engine: the C++ extension, put behind the engine's interface."""

from typing import cast

import torch

from offload import _native
from offload.engines.base import Arena, Engine, Request, Slot


class NativeEngine(Engine):
    """O_DIRECT through huge-page memory by a few C++ threads that never need the interpreter."""

    name = "native"

    def __init__(self, directory: str, *, threads: int, block_bytes: int) -> None:
        self._file = _native.File(directory)
        self._queue = _native.Queue(self._file, threads=threads, block_bytes=block_bytes)

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

    def alias(self, slot: Slot) -> torch.UntypedStorage:
        return torch.frombuffer(cast(_native.Slot, slot), dtype=torch.uint8).untyped_storage()

    def reserve(self, end_bytes: int) -> None:
        self._file.reserve(end_bytes)

    def write(self, slot: Slot, offset: int) -> Request:
        return self._queue.write(cast(_native.Slot, slot), offset)

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        return self._queue.read(cast(_native.Slot, slot), offset, urgent=urgent, crc=checksum)

    def close(self) -> None:
        self._queue.close()
