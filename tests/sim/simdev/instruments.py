"""What a test can see (races, virtual time, counters) and what it says about the host."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from .loading import native


def races(*, clear: bool = True) -> list[str]:
    """The accesses that nothing orders, one line each, oldest first.

    Found while tasks are queued, so the scheduler matters only to a program that asks how far the
    device is. A strided tensor counts as all bytes from its first to its last element. Accesses by
    the host count only where :func:`host_access` tells of them. At most 1000 are kept.

    Args:
        clear: forget them.
    """
    return list(native().races(clear))


def host_access(address: int, nbytes: int, *, is_write: bool, what: str = "host access") -> None:
    """Say that the host reads or writes pinned memory now, which the device cannot see by itself.

    Args:
        address: of the first byte.
        nbytes: how many bytes.
        is_write: whether they are written.
        what: names the access in reports.
    """
    native().host_access(address, nbytes, is_write, what)


def host_register(address: int, nbytes: int) -> None:
    """Make memory that somebody else owns pinned memory, until :func:`host_unregister`.

    Args:
        address: of the first byte, a multiple of a page.
        nbytes: how many bytes.

    Raises:
        ValueError: the range is empty, not aligned to a page or overlaps pinned memory.
    """
    if address % 4096 != 0:
        raise ValueError(f"address {address:#x} is not a multiple of a page")
    if not native().host_register(address, nbytes):
        raise ValueError(f"{nbytes} bytes at {address:#x} are empty or overlap pinned memory")


def host_unregister(address: int) -> None:
    """End a registration. A copy that may still be in flight there is reported as a race.

    Raises:
        ValueError: no registration begins at ``address``.
    """
    if not native().host_unregister(address):
        raise ValueError(f"nothing is registered at {address:#x}")


@contextmanager
def own_host_clock() -> Iterator[None]:
    """Give this thread a host clock of its own, which begins with what the shared one knows.

    All threads normally share one clock: what one has waited for, all know. That is right for
    threads that take turns. A thread that works beside the others should have its own; then a
    hand-over between threads counts only if :func:`host_release` and :func:`host_acquire` tell it.
    """
    native().own_host_clock()
    try:
        yield
    finally:
        native().shared_host_clock()


def host_release(token: int) -> None:
    """Leave what this thread's clock knows, and its time, under ``token`` for who acquires it."""
    native().host_release(token)


def host_acquire(token: int) -> None:
    """Pick up all that was released under ``token`` so far; nothing if nothing was."""
    native().host_acquire(token)


def virtual_time_ns() -> int:
    """When all that is queued will be done, in nanoseconds of virtual time since the last reset."""
    return int(native().all_done_ns())


def host_virtual_time_ns() -> int:
    """What time it is for this thread's host clock, in nanoseconds since the last reset."""
    return int(native().host_ns())


def advance_host_ns(duration_ns: int) -> None:
    """Let the host be busy with something else for ``duration_ns`` of virtual time."""
    native().advance_host(duration_ns)


@dataclass(frozen=True)
class HostSyncs:
    """How often the host waited, or would have, by cause."""

    stream: int
    event: int
    device: int
    copy: int
    """Blocking copies, pageable memory included."""
    item: int
    """``.item()`` and its like."""
    operator: int
    """Operators whose results depend on data, such as ``nonzero``."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.stream + self.event + self.device + self.copy + self.item + self.operator


@dataclass(frozen=True)
class Copies:
    """Copies over one direction of the link."""

    count: int
    nbytes: int


@dataclass(frozen=True)
class Memory:
    """Bytes of one kind of memory."""

    current_bytes: int
    peak_bytes: int


@dataclass(frozen=True)
class Stats:
    """What happened since the last reset."""

    syncs: HostSyncs
    d2h: Copies
    h2d: Copies
    allocated: Memory
    """Device memory in use, in blocks of 512 bytes."""
    reserved: Memory
    """The same, with what is cached for reuse."""
    pinned: Memory
    """Host memory that torch pinned (what it caches included) or somebody registered."""
    kernels: int
    tasks_run: int
    """Tasks of all kinds that have run so far, internal ones included."""
    async_operators: int
    sync_operators: dict[str, str]
    """Operators the host waited for at least once, each with the last reason."""


def stats() -> Stats:
    """Counters since the last reset, and current memory."""
    module = native()
    counters, operators = module.counters(), module.operator_counts()

    def memory(raw: object) -> Memory:
        return Memory(raw.current_bytes, raw.peak_bytes)  # type: ignore[attr-defined]

    return Stats(
        syncs=HostSyncs(*counters.syncs),
        d2h=Copies(counters.d2h_copies, counters.d2h_bytes),
        h2d=Copies(counters.h2d_copies, counters.h2d_bytes),
        allocated=memory(module.allocated()),
        reserved=memory(module.reserved()),
        pinned=memory(module.pinned()),
        kernels=counters.kernels,
        tasks_run=counters.tasks_run,
        async_operators=operators.asynchronous,
        sync_operators=dict(operators.why_synchronous),
    )
