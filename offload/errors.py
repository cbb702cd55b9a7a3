"""Everything the package raises on purpose at run time.

    OffloadError(RuntimeError)
     |- StorageError            the disk tier failed: what was done, where, how much, the errno
     |- ModifiedInPlaceError    a saved tensor was changed before its backward, as torch itself reports it
     '- StateError              a rule of ours was broken: out-of-order exit, use after a fork, a bug

A mistake in an argument is a ``ValueError`` or ``TypeError`` where the argument is given. ``OffloadWarning``
is the category of every warning. This module imports nothing.
"""


class OffloadError(RuntimeError):
    """Base of everything this package raises on purpose at run time."""


class StorageError(OffloadError):
    """The disk tier failed and bytes could not be stored or brought back.

    Attributes:
        errno: the operating system's error number, or ``None`` where there is none.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class ModifiedInPlaceError(OffloadError):
    """A tensor saved for backward was modified in place before backward needed it.

    torch raises a plain ``RuntimeError`` for this; any saved-tensor hook switches its check off, so the
    session makes the check itself and raises this subclass of ``RuntimeError`` with the same meaning.
    """


class StateError(OffloadError):
    """Something was asked for in a state that does not allow it."""


class OffloadWarning(UserWarning):
    """The step goes on, but not the way it was configured: the message says why and what to do."""
