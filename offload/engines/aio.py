"""The aio engine: asyncio, aiofiles and mmap, for installations without a compiler.

It keeps the whole contract of the native engine (direct I/O from page-aligned memory, priorities,
checked completions) at a Python price: a few hundred microseconds of interpreter time a request.
"""

import asyncio
import contextlib
import ctypes
import errno
import itertools
import mmap
import os
import tempfile
import threading
import time
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor

import torch
from aiofiles.base import wrap

from offload.engines.base import PAGE_BYTES, Arena, Engine, Request, Slot, padded
from offload.engines.budget import Budget
from offload.engines.freelist import FreeList
from offload.errors import StateError

_pwrite = wrap(os.pwrite)
_preadv = wrap(os.preadv)
_URGENT, _READ, _WRITE = range(3)  # lower goes first
_here = threading.local()  # .engine: set on the threads of engines


class _Claim:
    """Stands for a slot and all its views where its memory comes from."""

    __slots__ = ("__weakref__",)


class AioSlot:
    """A range of a mapping. Its memory is given back when the slot and every view of it have
    died.
    """

    def __init__(self, mapping: mmap.mmap, offset: int, nbytes: int, claim: object) -> None:
        # Every view is a view of this object, so its death is the death of the last of them.
        owner = (ctypes.c_ubyte * padded(nbytes)).from_buffer(mapping, offset)
        owner.claim = claim  # type: ignore[attr-defined]
        self.address = ctypes.addressof(owner)
        self.nbytes = nbytes
        self.padded = memoryview(owner).cast("B")

    @property
    def view(self) -> memoryview:
        """The bytes that were asked for, without the padding."""
        return self.padded[: self.nbytes]


class AioArena:
    """A slab from mmap and a free list over it."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = padded(capacity_bytes)
        self._slab = _anonymous(self.capacity_bytes)
        self._free = FreeList(self.capacity_bytes)
        self._outside = Budget(1 << 62)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._in_slab()

    @property
    def outside_bytes(self) -> int:
        with self._lock:
            return self._outside.used_bytes

    @property
    def held_bytes(self) -> int:
        with self._lock:
            return self._in_slab() + self._outside.used_bytes

    def _in_slab(self) -> int:
        self._free.settle()
        return self.capacity_bytes - self._free.free_bytes

    def allocate(self, nbytes: int) -> AioSlot | None:
        claim = _Claim()
        with self._lock:
            self._free.settle()
            offset = self._free.take(padded(nbytes), claim)
        return None if offset is None else AioSlot(self._slab, offset, nbytes, claim)

    def allocate_outside(self, nbytes: int) -> AioSlot:
        with self._lock:
            claim = self._outside.reserve(padded(nbytes))
        return AioSlot(_anonymous(padded(nbytes)), 0, nbytes, claim)

    def trim(self, keep_bytes: int) -> None:
        if mmap.PAGESIZE != PAGE_BYTES:
            return  # larger pages would be shared by what is free and what is not
        with self._lock:
            self._free.settle()
            for offset, nbytes in self._free.beyond(padded(keep_bytes)):
                self._slab.madvise(mmap.MADV_DONTNEED, offset, nbytes)


def _anonymous(nbytes: int) -> mmap.mmap:
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Direct I/O through pages of 2 MiB takes a fifth of the CPU time.
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


class _Inbox:
    """Where requests wait for the event loop: urgent reads, then reads, then writes, each in
    order.
    """

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.queue: asyncio.PriorityQueue[tuple[int, int, AioRequest | None]] = (
            asyncio.PriorityQueue()
        )
        self._order = itertools.count()

    def put(self, request: "AioRequest | None", priority: int) -> None:
        """From any thread."""
        self.loop.call_soon_threadsafe(
            self.queue.put_nowait, (priority, next(self._order), request)
        )


class AioRequest:
    """A transfer that a coroutine of the engine carries out."""

    def __init__(
        self, slot: AioSlot, offset: int, inbox: _Inbox, *, write: bool, checksum: int | None
    ) -> None:
        self.slot: AioSlot | None = slot  # let go of at completion
        self.offset = offset
        self.is_write = write
        self.checksum = checksum
        self.start_ns = self.end_ns = 0
        self._inbox = inbox
        self._error: OSError | None = None
        # Locks themselves, not what is made of them in Python: an interrupt in the middle of that
        # would leave one locked for good, and hang whoever comes next.
        self._done = False
        self._running = threading.Lock()
        self._running.acquire()
        self._lock = threading.Lock()
        self._taken = False

    def done(self) -> bool:
        return self._done

    def wait(self) -> bool:
        while not self._done:
            with self._running:
                pass
        if self._error is not None:
            raise OSError(self._error.errno, os.strerror(self._error.errno or 0))
        return True

    def take(self) -> bool:
        """Claim it: True for exactly one caller, the worker that runs it or the one who cancels
        it.
        """
        with self._lock:
            first, self._taken = not self._taken, True
            return first

    def cancel(self) -> bool:
        cancelled = OSError(errno.ECANCELED, os.strerror(errno.ECANCELED))
        with self._lock:
            if self._taken:
                return False
            # Taken and complete without a call between, at which an interrupt could come.
            self._error, self.slot, self._taken, self._done = cancelled, None, True, True
            self._running.release()
        return True

    def promote(self) -> None:
        # It then stands in the queue twice: whoever meets it second passes it over.
        if not self._taken:
            self._inbox.put(self, _URGENT)

    def complete(self, error: OSError | None) -> None:
        """Latch the outcome and wake whoever waits."""
        self._error = error
        self.slot = None
        self._done = True
        self._running.release()


class AioEngine(Engine):
    """A few coroutines on one event-loop thread; aiofiles carries their system calls to its thread
    pool.
    """

    name = "aio"

    def __init__(self, directory: str, *, threads: int, block_bytes: int) -> None:
        self._fd = _scratch_file(directory)
        self._pid = os.getpid()
        self._inbox = _Inbox()
        thread = threading.Thread(
            target=_run_workers,
            args=(self._inbox, self._fd, threads, block_bytes),
            name="offload-aio",
            daemon=True,
        )
        thread.start()
        # Also at exit, while threads can still be joined; nothing in it holds the engine.
        self._finish = weakref.finalize(self, _shut_down, self._inbox, thread, self._fd, self._pid)

    def arena(self, capacity_bytes: int) -> Arena:
        return AioArena(capacity_bytes)

    def copy(self, slot: Slot, storage: torch.UntypedStorage, *, checksum: bool) -> int | None:
        assert isinstance(slot, AioSlot)
        source = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
        torch.frombuffer(slot.view, dtype=torch.uint8).copy_(source)
        return zlib.crc32(slot.view) if checksum else None

    def checksum(self, slot: Slot) -> int:
        assert isinstance(slot, AioSlot)
        return zlib.crc32(slot.view)

    def alias(self, slot: Slot) -> torch.UntypedStorage:
        assert isinstance(slot, AioSlot)
        return torch.frombuffer(slot.view, dtype=torch.uint8).untyped_storage()

    def reserve(self, end_bytes: int) -> None:
        try:
            os.posix_fallocate(self._fd, 0, end_bytes)
        except OSError as e:
            if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise  # else: the file system cannot preallocate; the file grows as it is written

    def write(self, slot: Slot, offset: int) -> Request:
        assert isinstance(slot, AioSlot)
        return self._submit(
            AioRequest(slot, offset, self._inbox, write=True, checksum=None), _WRITE
        )

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        assert isinstance(slot, AioSlot)
        request = AioRequest(slot, offset, self._inbox, write=False, checksum=checksum)
        return self._submit(request, _URGENT if urgent else _READ)

    def _submit(self, request: AioRequest, priority: int) -> AioRequest:
        if self._pid != os.getpid():
            raise StateError(
                "this process was forked from the one that opened the session; open its own session"
            )
        if not self._finish.alive:
            raise StateError("the engine is closed")
        self._inbox.put(request, priority)
        return request

    def close(self) -> None:
        self._finish()


def _shut_down(inbox: _Inbox, thread: threading.Thread, fd: int, pid: int) -> None:
    """Let what waits finish, then let go. A forked child only lets go of its own descriptor.

    The garbage collector may come here on any thread, also on one that the engine's waits for.
    """
    if os.getpid() != pid:
        os.close(fd)
        return
    inbox.put(None, _WRITE + 1)  # behind everything that waits
    if not hasattr(_here, "engine"):
        thread.join()


def _scratch_file(directory: str) -> int:
    """A file without a name, for direct I/O where the file system can."""
    for direct in (getattr(os, "O_DIRECT", 0), 0):
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | direct, 0o600)
        except OSError as e:
            if e.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EISDIR):
                raise
    fd, path = tempfile.mkstemp(prefix=".offload-", dir=directory)
    os.unlink(path)
    return fd


def _run_workers(inbox: _Inbox, fd: int, workers: int, block_bytes: int) -> None:
    """The engine's thread. It holds no reference to the engine, so that the engine can die. It is
    the last to use the file.
    """
    loop = inbox.loop
    asyncio.set_event_loop(loop)
    _mark_thread()
    loop.set_default_executor(
        ThreadPoolExecutor(thread_name_prefix="offload-aio", initializer=_mark_thread)
    )

    async def work_all() -> None:
        await asyncio.gather(*(_work(inbox, fd, block_bytes) for _ in range(workers)))

    loop.run_until_complete(work_all())
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    os.close(fd)


def _mark_thread() -> None:
    _here.engine = True


async def _work(inbox: _Inbox, fd: int, block_bytes: int) -> None:
    while True:
        _, _, request = await inbox.queue.get()
        if request is None:
            inbox.put(None, _WRITE + 1)  # for the next worker
            return
        await _carry_out(request, fd, block_bytes)
        del request  # not until the next one comes


async def _carry_out(request: AioRequest, fd: int, block_bytes: int) -> None:
    slot = request.slot
    if slot is None or not request.take():  # cancelled, or met already under another priority
        return
    request.start_ns = time.perf_counter_ns()
    error: OSError | None = None
    try:
        await _transfer(
            fd, slot.padded, request.offset, write=request.is_write, block_bytes=block_bytes
        )
        if request.checksum is not None and zlib.crc32(slot.view) != request.checksum:
            error = OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
    except Exception as e:  # at the interpreter's end, no thread can be had for a transfer
        told = e if isinstance(e, OSError) else OSError(errno.EIO, f"{type(e).__name__}: {e}")
        error = told.with_traceback(None)  # whose frames hold the slot
    del slot  # before the waiter wakes: it may look at who still holds the memory
    request.end_ns = time.perf_counter_ns()
    request.complete(error)


async def _transfer(
    fd: int, data: memoryview, offset: int, *, write: bool, block_bytes: int
) -> None:
    """All of ``data``: a system call may move less than it was asked to."""
    done = 0
    while done < len(data):
        # Released here: the pool's thread holds its arguments for a moment after it is done, and
        # with them the slot would not be free yet for whoever waits for this transfer.
        with data[done : done + block_bytes] as piece:
            if write:
                n = await _pwrite(fd, piece, offset + done)
            else:
                n = await _preadv(fd, [piece], offset + done)
        if n == 0:
            raise OSError(errno.EIO, f"end of file at {offset + done}")
        done += n
