"""What is known of a storage or a tensor without holding its memory: StorageRef, VersionWitness."""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeVar

import torch

from offload.errors import ModifiedInPlaceError
from offload.tensors.layout import TensorLayout, with_bits

T = TypeVar("T")

try:
    from offload._native import Finally
except ImportError:  # no compiler at installation

    class Finally:  # type: ignore[no-redef]
        """Calls ``function(argument)`` when it dies."""

        def __init__(self, function: Callable[[T], object], argument: T) -> None:
            self._due = partial(function, argument)

        # A Ctrl-C that has come meanwhile is raised in here, and dropped. Not where it is C++.
        def __del__(self) -> None:
            self._due()


_weak_ref = torch.UntypedStorage._weak_ref
_free_weak_ref = torch.UntypedStorage._free_weak_ref
_revived = torch.UntypedStorage._new_with_weak_ptr


class StorageRef:
    """A weak reference to a storage that keeps its address from being given out again: what
    ``torch.multiprocessing.reductions.StorageWeakRef`` is, in fewer frames of Python.

    Python's own weak references will not do: a thread of autograd's may destroy the storage while
    one of them revives it.

    Example:
        >>> x = torch.ones(4)
        >>> ref = StorageRef(x.untyped_storage())
        >>> ref.storage() is x.untyped_storage()
        True
        >>> del x
        >>> ref.storage() is None
        True
    """

    __slots__ = ("_freed", "cdata")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: int = _weak_ref(storage)  # type: ignore[assignment]
        self._freed = Finally(_free_weak_ref, self.cdata)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if it is alive."""
        return _revived(self.cdata)


@cache
def _nothing(device: torch.device, conjugate: bool, negative: bool) -> torch.Tensor:
    """No bytes, of the same kind in the eyes of ``Tensor.data``."""
    dtype = torch.complex64 if conjugate or negative else torch.float32
    return with_bits(torch.empty(0, dtype=dtype, device=device), conjugate, negative)


class VersionWitness:
    """Tells whether a tensor was modified in place since, without holding its memory.

    A detached alias shares the version counter of the tensor it came from; giving it other data
    lets the memory go and leaves the counter. torch itself makes this check unless a saved-tensor
    hook is active, so the hooks have to make it.
    """

    __slots__ = ("_version", "counter")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = tensor._version
        self.counter = tensor.detach()
        self.counter.data = _nothing(tensor.device, tensor.is_conj(), tensor.is_neg())

    @property
    def modified(self) -> bool:
        """Whether the version counter has moved."""
        return self.counter._version != self._version

    def check(self, layout: TensorLayout) -> None:
        """Raise ``ModifiedInPlaceError`` if it was, as torch would."""
        if self.counter._version != self._version:
            raise modified_in_place(layout, self.counter._version, self._version)


def modified_in_place(layout: TensorLayout, version: int, expected: int) -> ModifiedInPlaceError:
    """The error in torch's own words, so that what people search for is found."""
    return ModifiedInPlaceError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{layout}] is at version {version}; expected version {expected} instead. "
        "Hint: torch.autograd.set_detect_anomaly(True) finds the operation whose gradient failed"
    )
