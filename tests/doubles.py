"""Engines that fail, lag or lack memory: the real interface over a real engine."""

import errno
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from offload.engines import Arena, Engine, Request, Slot


class FailedRequest:
    """A transfer that the operating system refused."""

    start_ns = end_ns = 0

    def __init__(self, code: int) -> None:
        self._code = code

    def done(self) -> bool:
        return True

    def wait(self) -> bool:
        raise OSError(self._code, os.strerror(self._code))

    def cancel(self) -> bool:
        return False

    def promote(self) -> None:
        pass


class LazyRequest:
    """A transfer that does not begin before somebody waits for it, or opens the gate."""

    def __init__(self, engine: "LazyEngine", nbytes: int, start: Callable[[], Request]) -> None:
        self._engine = engine
        self._nbytes = nbytes
        self._start: Callable[[], Request] | None = start  # holds the slot until it is done
        self._inner: Request | None = None
        self._cancelled = False
        self.promoted = False

    @property
    def start_ns(self) -> int:
        return self._inner.start_ns if self._inner is not None else 0

    @property
    def end_ns(self) -> int:
        return self._inner.end_ns if self._inner is not None else 0

    def done(self) -> bool:
        return self._cancelled or self._inner is not None

    def wait(self) -> bool:
        if self._cancelled:
            raise OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        if self._start is not None:
            self._inner, self._start = self._start(), None
            self._inner.wait()
            self._engine.in_flight_bytes -= self._nbytes
        assert self._inner is not None
        return self._inner.wait()

    def cancel(self) -> bool:
        if self.done():
            return False
        self._cancelled, self._start = True, None
        self._engine.in_flight_bytes -= self._nbytes
        return True

    def promote(self) -> None:
        self.promoted = True


class WrappedEngine(Engine):
    """Does what the engine within does."""

    name = "double"

    def __init__(self, inner: Engine) -> None:
        self.inner = inner

    def arena(self, capacity_bytes: int) -> Arena:
        return self.inner.arena(capacity_bytes)

    def copy(self, slot: Slot, storage: torch.UntypedStorage, *, checksum: bool) -> int | None:
        return self.inner.copy(slot, storage, checksum=checksum)

    def checksum(self, slot: Slot) -> int:
        return self.inner.checksum(slot)

    def alias(self, slot: Slot) -> torch.UntypedStorage:
        return self.inner.alias(slot)

    def reserve(self, end_bytes: int) -> None:
        self.inner.reserve(end_bytes)

    def write(self, slot: Slot, offset: int) -> Request:
        return self.inner.write(slot, offset)

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        return self.inner.read(slot, offset, urgent=urgent, checksum=checksum)

    def close(self) -> None:
        self.inner.close()


class FaultyEngine(WrappedEngine):
    """Fails with an error number: writes or reads after a count of good ones, or reservations."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.good_writes: int | None = None  # before the first bad one; None: all are good
        self.good_reads: int | None = None
        self.code = errno.EIO
        self.reserve_code = 0
        self.writes = self.reads = 0

    def reserve(self, end_bytes: int) -> None:
        if self.reserve_code:
            raise OSError(self.reserve_code, os.strerror(self.reserve_code))
        super().reserve(end_bytes)

    def write(self, slot: Slot, offset: int) -> Request:
        self.writes += 1
        if self.good_writes is not None and self.writes > self.good_writes:
            return FailedRequest(self.code)
        return super().write(slot, offset)

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        self.reads += 1
        if self.good_reads is not None and self.reads > self.good_reads:
            return FailedRequest(self.code)
        return super().read(slot, offset, urgent=urgent, checksum=checksum)


class LateEngine(FaultyEngine):
    """Writes do not end before ``over`` is set, and then they have failed."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner)
        self.good_writes, self.over = 0, False

    def write(self, slot: Any, offset: int) -> Any:
        request: Any = super().write(slot, offset)
        if isinstance(request, FailedRequest):
            request.done = lambda: self.over
        return request


class InterruptedOnce(FaultyEngine):
    """The first wait for a write is interrupted, as by Ctrl-C; the write goes on."""

    def write(self, slot: Any, offset: int) -> Any:
        request = super().write(slot, offset)
        return Interrupted(request) if self.writes == 1 else request


class Interrupted:
    def __init__(self, inner: Any) -> None:
        self.inner, self.interrupted, self.finished = inner, False, False
        self.start_ns = self.end_ns = 0

    def done(self) -> bool:
        return self.finished

    def wait(self) -> bool:
        if not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt
        self.finished = True
        return self.inner.wait()

    def cancel(self) -> bool:
        return False

    def promote(self) -> None:
        pass


class LazyEngine(WrappedEngine):
    """As slow as can be: nothing moves until somebody waits. Counts the bytes in flight."""

    def __init__(self, inner: Engine, *, writes: bool = True, reads: bool = True) -> None:
        super().__init__(inner)
        self._lazy_writes, self._lazy_reads = writes, reads
        self.in_flight_bytes = 0
        self.sizes_in_flight: list[tuple[int, int]] = []  # (bytes of all, bytes of the newest)
        self.requests: list[LazyRequest] = []

    def _lazily(self, nbytes: int, start: Callable[[], Request]) -> Request:
        self.in_flight_bytes += nbytes
        self.sizes_in_flight.append((self.in_flight_bytes, nbytes))
        self.requests.append(LazyRequest(self, nbytes, start))
        return self.requests[-1]

    def write(self, slot: Slot, offset: int) -> Request:
        if not self._lazy_writes:
            return super().write(slot, offset)
        return self._lazily(slot.nbytes, lambda: self.inner.write(slot, offset))

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        if not self._lazy_reads:
            return super().read(slot, offset, urgent=urgent, checksum=checksum)
        return self._lazily(
            slot.nbytes,
            lambda: self.inner.read(slot, offset, urgent=urgent, checksum=checksum),
        )


class SlowRequest:
    """A transfer that takes longer than it has to."""

    def __init__(self, inner: Request, seconds: float) -> None:
        self._inner = inner
        self.start_ns = time.perf_counter_ns()
        self.end_ns = self.start_ns + int(seconds * 1e9)

    def done(self) -> bool:
        return self._inner.done() and time.perf_counter_ns() >= self.end_ns

    def wait(self) -> bool:
        time.sleep(max(0, self.end_ns - time.perf_counter_ns()) / 1e9)
        return self._inner.wait()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def promote(self) -> None:
        self._inner.promote()


class SlowEngine(WrappedEngine):
    """A disk of a rate."""

    def __init__(self, inner: Engine, *, bytes_per_s: float) -> None:
        super().__init__(inner)
        self._bytes_per_s = bytes_per_s

    def write(self, slot: Slot, offset: int) -> Request:
        return SlowRequest(super().write(slot, offset), slot.nbytes / self._bytes_per_s)

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        request = super().read(slot, offset, urgent=urgent, checksum=checksum)
        return SlowRequest(request, slot.nbytes / self._bytes_per_s)


class ArenaWithoutRoom:
    """Refuses every slot, except those with a mapping of their own."""

    def __init__(self, inner: Arena) -> None:
        self._inner = inner

    @property
    def capacity_bytes(self) -> int:
        return self._inner.capacity_bytes

    @property
    def used_bytes(self) -> int:
        return self._inner.used_bytes

    @property
    def outside_bytes(self) -> int:
        return self._inner.outside_bytes

    @property
    def held_bytes(self) -> int:
        return self._inner.held_bytes

    def allocate(self, nbytes: int) -> Slot | None:
        return None

    def allocate_outside(self, nbytes: int) -> Slot:
        return self._inner.allocate_outside(nbytes)

    def trim(self, keep_bytes: int) -> None:
        self._inner.trim(keep_bytes)


class EngineWithoutRoom(WrappedEngine):
    """Has no host memory to give."""

    def arena(self, capacity_bytes: int) -> Arena:
        return ArenaWithoutRoom(self.inner.arena(capacity_bytes))
