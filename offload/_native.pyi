"""The native engine's types: a page-aligned arena, a scratch file and a bounded I/O queue.

Every call that can block releases the GIL and stays interruptible (Ctrl-C). Every failure of the
operating system is an OSError with errno. In a forked child every call raises RuntimeError: the
objects belong to the process that made them.
"""

from collections.abc import Callable
from os import PathLike
from typing import TypeVar, final

T = TypeVar("T")

def copy(dst: int, src: int, nbytes: int, threads: int = 2) -> None:
    """Copy between two addresses whose ranges do not overlap, by at most `threads` threads."""

def copy_crc32c(dst: int, src: int, nbytes: int, threads: int = 2) -> int:
    """Copy like `copy` and return the CRC-32C of the bytes; they are read only once."""

def crc32c(address: int, nbytes: int) -> int:
    """Return the CRC-32C of `nbytes` bytes at an address."""

@final
class Finally:
    """Calls `function(argument)` when it dies."""

    def __init__(self, function: Callable[[T], object], argument: T) -> None: ...

def use_pool_for_torch() -> str:
    """Put the pool under torch's CPU allocator, for the life of the process.

    Returns why it cannot be done, or an empty text. Only the first call does anything.
    """

def pool_stats() -> dict[str, int] | None:
    """Return the pool's figures, or None where there is none: `used_bytes`, `most_bytes` (in use at
    one time lately, arenas included), `kept_bytes` (free, but resident), `allocations`.
    """

def begin_pool_period() -> None:
    """Tell the pool, if there is one, that a training step begins: it keeps no more than the most
    that was in use in this step and the one before.
    """

@final
class Slot:
    """Host memory, given back when the last of its sharers lets go of it.

    Sharers are this object, requests in flight, and everything that views the bytes: a slot is a
    writable buffer (format "B", length `nbytes`). A tensor made by `torch.frombuffer(slot, ...)`
    keeps the memory alive, and with the memory nothing else.
    """

    @property
    def address(self) -> int:
        """Where the memory begins; a multiple of 4096."""
    @property
    def nbytes(self) -> int:
        """What was asked for. The memory reaches up to the next multiple of 4096."""
    def release(self) -> None:
        """Let go of the memory now, not when this object dies; it may not be used afterwards.

        Raises:
            ValueError: it was released before (a double free).
            BufferError: a buffer or a tensor still views the memory.
        """
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class Arena:
    """A slab of huge pages that is cut into slots, first fit at the lowest address."""

    def __init__(self, capacity_bytes: int, *, prefault: bool = True) -> None:
        """Map the slab, of `capacity_bytes` rounded up to 2 MiB.

        With `prefault`, a background thread makes all of it resident meanwhile.
        """
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def used_bytes(self) -> int:
        """Bytes of the slab held by slots, in whole pages."""
    @property
    def peak_bytes(self) -> int:
        """The highest `used_bytes` so far."""
    @property
    def outside_bytes(self) -> int:
        """Bytes held by slots with a mapping of their own, in whole pages."""
    @property
    def held_bytes(self) -> int:
        """`used_bytes` and `outside_bytes` of one moment."""
    @property
    def live_slots(self) -> int:
        """Slots of both kinds whose memory has not been given back."""
    @property
    def page_bytes(self) -> int:
        """2 MiB where the kernel gave huge pages (to most of what is resident), else 4096."""
    def allocate(self, nbytes: int) -> Slot | None:
        """Return a slot, or None when there is no room now.

        Raises:
            ValueError: `nbytes` is below 1 or above `capacity_bytes`, or the arena is closed.
        """
    def allocate_outside(self, nbytes: int) -> Slot:
        """Return a slot with a mapping of its own, for what cannot wait or never fits."""
    def trim(self, keep_bytes: int) -> None:
        """Give what is free beyond the first `keep_bytes` back to the system."""
    def close(self) -> int:
        """End allocation and return the number of slots still alive, a leak to report.

        The slab is unmapped when the last of them goes.
        """

@final
class File:
    """A scratch file without a name: nothing of it survives the process."""

    def __init__(self, directory: str | bytes | PathLike[str], *, direct: bool = True) -> None:
        """Create it; `direct` bypasses the page cache where the file system can."""
    @property
    def alignment_bytes(self) -> int:
        """What offsets must be a multiple of, and sizes are padded to: 4096 if direct, else 1."""
    @property
    def is_direct(self) -> bool: ...
    @property
    def allocated_bytes(self) -> int:
        """The end of the space reserved so far."""
    def reserve(self, end_bytes: int) -> None:
        """Give [0, end_bytes) its disk space; nothing to do if it has it already.

        Where the file system cannot, the space is taken as it is written. A reserve that fails
        (ENOSPC, EFBIG, ...) gives back what it had taken.
        """

@final
class Request:
    """A transfer that a queue accepted; it shares the slot's memory until it is done."""

    def done(self) -> bool:
        """True once it has completed, failed or been cancelled."""
    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until it is done; False on timeout.

        Raises:
            OSError: the transfer failed; raised by each call. EBADMSG: the bytes read do not have
                the checksum. ECANCELED: it was cancelled.
        """
    def cancel(self) -> bool:
        """Return True if no byte of it had been started: it then never runs."""
    def promote(self) -> None:
        """Make a read that is waiting urgent."""
    @property
    def start_ns(self) -> int:
        """`time.perf_counter_ns` when its first byte was started; 0 until then."""
    @property
    def end_ns(self) -> int:
        """`time.perf_counter_ns` when its last byte had arrived; 0 until then."""
    @property
    def nbytes(self) -> int: ...
    @property
    def offset(self) -> int: ...

@final
class Queue:
    """A bounded queue: urgent reads before reads before writes, served by a few threads."""

    def __init__(
        self,
        file: File,
        *,
        threads: int = 2,
        block_bytes: int = 4194304,
        capacity: int = 64,
    ) -> None:
        """Start `threads` workers, which share large requests in pieces of `block_bytes`."""
    def write(self, slot: Slot, offset: int) -> Request:
        """Queue a write; waits while `capacity` writes are waiting.

        With a direct file whole pages are written: up to 4095 bytes after the slot's `nbytes`.
        """
    def read(
        self, slot: Slot, offset: int, *, urgent: bool = False, crc: int | None = None
    ) -> Request:
        """Queue a read; waits while `capacity` reads are waiting.

        `crc` is the CRC-32C that the slot's bytes must have, checked by the workers.
        """
    def stats(self) -> dict[str, int]:
        """Return the counters so far.

        read_bytes and written_bytes (moved, padding included), reads and writes (completed),
        read_ns and write_ns (summed over the workers), cpu_ns (used by them), depth and peak_depth
        (requests accepted and not done).
        """
    def close(self) -> None:
        """Finish all that was accepted and end the workers; afterwards requests are ValueErrors."""
