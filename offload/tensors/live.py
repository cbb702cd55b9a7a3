"""Accounting of the saved activations that are alive: exact bytes, by storage, without polling.

[Note: death is told by a weak reference]
    torch keeps the Python object of a storage for as long as the C++ storage lives, whoever owns
    it. A plain ``weakref`` to that object therefore dies exactly when the memory is given back,
    also when the last owner was a C++ node of autograd's graph. Its callback is ``deque.append``:
    it may run on any thread, inside the garbage collector or while our own lock is held, so it
    takes no lock and decides nothing. The queue is drained at the next question or the next track.
    A peak can only arise where bytes are added, and there the queue has just been drained: the peak
    is exact.

[Note: an address is a key only while it is watched]
    ``storage._cdata`` is reused after a storage's death. A dead storage's record is in the queue
    before its address can be given out again, and every look-up drains the queue first.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import wraps
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["LiveBytes", "LiveBytesMeter", "hooks_below", "is_parameter_like", "storage_of"]

HookPair = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _Watch(weakref.ref[torch.UntypedStorage]):
    """A weak reference that remembers what it stands for; it is also its own death notice."""

    __slots__ = ("counted_bytes", "key")

    key: int
    counted_bytes: int  # 0 for an excluded storage


class LiveBytes:
    """Sum of the bytes of tracked storages that still exist; each storage is counted once.

    A storage counts with the size it had when it was first tracked. Thread-safe; a ``track`` of a
    storage that is already known costs well under a microsecond.

    Example:
        >>> import torch
        >>> live = LiveBytes()
        >>> x = torch.zeros(1024)                     # 4096 bytes
        >>> live.track(x.untyped_storage()), live.track(x[10:].untyped_storage())
        (True, False)
        >>> live.alive_bytes
        4096
        >>> del x
        >>> live.alive_bytes, live.peak_bytes
        (0, 4096)
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watches: dict[int, _Watch] = {}
        self._dead: deque[_Watch] = deque()  # see Note: death is told by a weak reference
        self._alive_bytes = 0
        self._peak_bytes = 0

    def track(self, storage: torch.UntypedStorage) -> bool:
        """Count ``storage`` until it dies.

        Returns:
            True if it is counted from now on; False if it already was, or is excluded.
        """
        key = storage._cdata
        with self._lock:
            if self._dead:
                self._drain()
            if key in self._watches:
                return False
            self._watch(storage, key, storage.nbytes())
            if self._alive_bytes > self._peak_bytes:
                self._peak_bytes = self._alive_bytes
            return True

    def exclude(self, storage: torch.UntypedStorage, *, unless_counted: bool = False) -> None:
        """Never count ``storage`` (a parameter's, say) for as long as it lives.

        A storage that is being counted stops counting, or with ``unless_counted`` goes on doing so;
        a peak it was part of stands.
        """
        key = storage._cdata
        with self._lock:
            self._drain()
            known = self._watches.get(key)
            if known is None:
                self._watch(storage, key, 0)
            elif not unless_counted:
                self._alive_bytes -= known.counted_bytes
                known.counted_bytes = 0

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Count ``storage`` no more, until it is tracked again."""
        with self._lock:
            self._drain()
            known = self._watches.pop(storage._cdata, None)
            if known is not None:
                self._alive_bytes -= known.counted_bytes

    def counts(self, storage: torch.UntypedStorage) -> bool:
        """Whether ``storage`` is tracked, or excluded."""
        with self._lock:
            self._drain()
            return storage._cdata in self._watches

    @property
    def alive_bytes(self) -> int:
        """Bytes of the tracked storages that are alive now."""
        if self._dead:
            with self._lock:
                self._drain()
        return self._alive_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that ``alive_bytes`` has been."""
        return self._peak_bytes

    def _watch(self, storage: torch.UntypedStorage, key: int, counted_bytes: int) -> None:
        watch = _Watch(storage, self._dead.append)
        watch.key = key
        watch.counted_bytes = counted_bytes
        self._watches[key] = watch
        self._alive_bytes += counted_bytes

    def _drain(self) -> None:
        while self._dead:
            watch = self._dead[0]
            # No call among these, so that an interrupt finds all done or none.
            del self._watches[watch.key], self._dead[0]
            self._alive_bytes -= watch.counted_bytes


def is_parameter_like(tensor: Tensor) -> bool:
    """Whether ``tensor`` is a parameter or a view of one (a linear layer saves ``weight.t()``)."""
    base = tensor._base
    # The types first: torch.nn.Parameter decides in Python what is an instance of it.
    return (type(tensor) is not Tensor and isinstance(tensor, torch.nn.Parameter)) or (
        base is not None and type(base) is not Tensor and isinstance(base, torch.nn.Parameter)
    )


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage with the bytes of ``tensor``; None where it has none of its own to measure.

    Sparse and wrapped tensors refuse the question; meta and fake tensors hold no bytes.
    """
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() != 0 else None
    except (NotImplementedError, RuntimeError):
        return None


def hooks_below() -> HookPair:
    """The saved-tensor hooks in force on this thread, for a pair above them to pass everything on
    to; where there are none, a pair that keeps what it is given.

    A pack above wraps the one below (``functools.wraps``), as that is what hooks are known by.

    It keeps a detached alias: pack's own argument would tie a node's output to the node in a cycle
    that the garbage collector cannot see.
    """
    pair: HookPair | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return pair if pair is not None else (Tensor.detach, lambda tensor: tensor)


class LiveBytesMeter:
    """Measures what saved activations really occupy, under any other saved-tensor hooks.

    A context manager, to be entered *inside* the hooks it observes: it passes every tensor on to
    the pair that was active when it was entered, and keeps the tensor (detached) if there was none.
    What counts is the storage of every tensor that autograd asks to save or that a hook restores,
    from that moment until the storage dies, and whatever ``extra_bytes`` says at each pack and
    unpack. Parameters and their views never count. The in-place check of autograd is off inside, as
    under any saved-tensor hook.

    ``torch.utils.checkpoint`` hides what happens inside a region from outer hooks. Enter the meter
    within the checkpointed function to count recomputed saves as well; it may be entered any number
    of times, nested and from several threads.

    Args:
        exclude: tensors that never count, such as ``model.parameters()`` and ``model.buffers()``.
        extra_bytes: memory that stands in for saved storages, e.g. the bytes of an arena in use.
            Storages that the hooks below restore are then taken to be part of it, and only those
            that were saved count by themselves.
        observer: called with ``alive_bytes`` at every pack and unpack.

    Example:
        >>> import torch
        >>> x = torch.ones(1024, requires_grad=True)
        >>> with LiveBytesMeter() as meter:
        ...     loss = x.exp().exp().sum()            # saves both results, 4096 bytes each
        >>> meter.alive_bytes
        8192
        >>> loss.backward()
        >>> meter.alive_bytes, meter.peak_bytes
        (0, 8192)
    """

    def __init__(
        self,
        *,
        exclude: Iterable[Tensor] = (),
        extra_bytes: Callable[[], int] | None = None,
        observer: Callable[[int], object] | None = None,
    ) -> None:
        self._live = LiveBytes()
        self._extra_bytes = extra_bytes
        self._observer = observer
        self._peak_bytes = 0
        self._entered = threading.local()  # torch's hook stack is per thread
        for tensor in exclude:
            storage = storage_of(tensor)
            if storage is not None:
                self._live.exclude(storage)

    @property
    def alive_bytes(self) -> int:
        """Bytes alive now, ``extra_bytes`` included."""
        return self._live.alive_bytes + (self._extra_bytes() if self._extra_bytes else 0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes alive at any pack or unpack."""
        return self._peak_bytes

    def __enter__(self) -> LiveBytesMeter:
        hooks = saved_tensors_hooks(*self._pair())
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        hooks.__enter__()
        self._entered.stack.append(hooks)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._entered.stack.pop().__exit__(exc_type, exc, traceback)

    def _pair(self) -> HookPair:
        below_pack, below_unpack = hooks_below()

        @wraps(below_pack)
        def pack(tensor: Tensor) -> Any:
            self._count(tensor)
            packed = below_pack(tensor)
            self._mark()  # both the tensor and what the hook made of it exist now
            return packed

        def unpack(packed: Any) -> Tensor:
            tensor = below_unpack(packed)
            if self._extra_bytes is None:
                self._count(tensor)
            else:
                self._exclude_restored(tensor)
            return tensor

        return pack, unpack

    def _count(self, tensor: Tensor) -> None:
        if not is_parameter_like(tensor):
            storage = storage_of(tensor)
            if storage is not None:
                self._live.track(storage)
        self._mark()

    def _exclude_restored(self, tensor: Tensor) -> None:
        # A restored tensor may be saved again, as the input of a recomputed block is: without this
        # its memory would then count twice.
        storage = storage_of(tensor)
        if storage is not None:
            self._live.exclude(storage, unless_counted=True)
        self._mark()

    def _mark(self) -> None:
        alive_bytes = self.alive_bytes
        if alive_bytes > self._peak_bytes:
            self._peak_bytes = alive_bytes
        if self._observer is not None:
            self._observer(alive_bytes)
