"""StorageRef: a weak reference to a storage that keeps its address from being given out again."""

import torch

_weak_ref = torch.UntypedStorage._weak_ref
_free_weak_ref = torch.UntypedStorage._free_weak_ref
_revived = torch.UntypedStorage._new_with_weak_ptr


class StorageRef:
    """What ``torch.multiprocessing.reductions.StorageWeakRef`` is, without the frames of Python
    around each of torch's calls.

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

    __slots__ = ("cdata",)

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.cdata: int = _weak_ref(storage)  # type: ignore[assignment]

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, if it is alive."""
        return _revived(self.cdata)

    # The default outlives the module's names when the interpreter ends.
    def __del__(self, free=_free_weak_ref) -> None:  # type: ignore[no-untyped-def]
        if hasattr(self, "cdata"):  # an interrupt may have come before
            free(self.cdata)
