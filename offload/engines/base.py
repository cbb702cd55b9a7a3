"""What every engine offers: memory to move bytes through, copies into it, and I/O on one scratch
file.

An engine decides nothing and knows nothing of blocks: it is told which slot to move where and
answers with a ``Request``. A request holds its slot's memory until it has completed, whoever else
lets go of it.
"""

from abc import ABC, abstractmethod
from typing import Protocol

import torch

PAGE_BYTES = 4096  # slots and extents are padded to this: direct I/O moves whole blocks


def padded(nbytes: int) -> int:
    """What a slot or an extent for so many bytes takes."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


class Slot(Protocol):
    """A page-aligned piece of host memory, given back when the last reference to it dies."""

    @property
    def address(self) -> int:
        """Of the first byte."""

    @property
    def nbytes(self) -> int:
        """What was asked for; the memory behind it reaches up to the next multiple of
        ``PAGE_BYTES``.
        """


class Arena(Protocol):
    """Host memory of a fixed size, handed out as slots."""

    @property
    def capacity_bytes(self) -> int:
        """Its size."""

    @property
    def used_bytes(self) -> int:
        """Bytes of slots now alive."""

    @property
    def outside_bytes(self) -> int:
        """Bytes of slots with a mapping of their own."""

    @property
    def held_bytes(self) -> int:
        """Both together, as one look finds them."""

    def allocate(self, nbytes: int) -> Slot | None:
        """A slot, or ``None`` where there is no room now."""

    def allocate_outside(self, nbytes: int) -> Slot:
        """A slot with a mapping of its own, for what cannot wait or never fits."""

    def trim(self, keep_bytes: int) -> None:
        """Give what is free beyond the first ``keep_bytes`` back to the system. Not for memory that
        a device has pinned.
        """


class Request(Protocol):
    """One read or write, on its way."""

    @property
    def start_ns(self) -> int:
        """When a worker took it up, on the clock of ``time.perf_counter_ns``."""

    @property
    def end_ns(self) -> int:
        """When its last byte had been moved."""

    def done(self) -> bool:
        """Whether it has completed, well or not."""

    def wait(self) -> bool:
        """Wait until it has completed. Raises ``OSError`` if it failed: ``EBADMSG`` for a wrong
        checksum, ``ECANCELED`` if it was cancelled.
        """

    def cancel(self) -> bool:
        """Keep it from running; False if it has begun."""

    def promote(self) -> None:
        """Somebody waits for this read now: it goes before everything else."""


class Engine(ABC):
    """One scratch file and everything that moves bytes to and from it."""

    name: str

    @abstractmethod
    def arena(self, capacity_bytes: int) -> Arena:
        """Memory that this engine can move bytes from and to."""

    @abstractmethod
    def copy(self, slot: Slot, storage: torch.UntypedStorage, *, checksum: bool) -> int | None:
        """Copy the bytes of ``storage`` into ``slot``; returns their checksum if asked for."""

    @abstractmethod
    def checksum(self, slot: Slot) -> int:
        """The checksum of the bytes in ``slot``, as ``copy`` and ``read`` compute it."""

    @abstractmethod
    def alias(self, slot: Slot) -> torch.UntypedStorage:
        """A storage over the slot's bytes, without a copy. The slot lives as long as the
        storage.
        """

    @abstractmethod
    def reserve(self, end_bytes: int) -> None:
        """Make the file's first ``end_bytes`` bytes exist on the disk; raises ``OSError``."""

    @abstractmethod
    def write(self, slot: Slot, offset: int) -> Request:
        """Start writing the slot to the file."""

    @abstractmethod
    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        """Start filling the slot from the file; an urgent read goes before everything that
        waits.
        """

    @abstractmethod
    def close(self) -> None:
        """Let what was started finish, then let go of the threads and the file. May be called
        twice.
        """
