"""Everything the package raises on purpose at run time.

    OffloadError(RuntimeError)
     |- StorageError            the disk tier failed: what, where, how much, the errno
     |- ModifiedInPlaceError    a saved tensor was changed before its backward
     |- StateError              a rule was broken: exit out of order, use after a fork, a bug
     |- PlanError               no plan fits the budgets, or a plan does not fit the model
     |   '- SegmentError         a model has no such parts, or a step does not run them
     |- StepError               a step saves nothing that could be moved
     '- OrderError              OFFLOAD_CHECK=1 found two accesses that nothing orders: a bug

A mistake in an argument is a ``ValueError`` or ``TypeError`` where the argument is given.
``OffloadWarning`` is the category of every warning, ``warn_user`` the way to give one. Nothing of
the package is imported here.
"""

import os
import sys
import warnings


class OffloadError(RuntimeError):
    """Base of everything this package raises on purpose at run time.

    Example:
        >>> import offload
        >>> try:
        ...     offload.Session().step().report
        ... except offload.OffloadError as error:
        ...     print(type(error).__name__, "-", str(error).partition(":")[0])
        StateError - the step has no report yet
    """


class StorageError(OffloadError):
    """The disk tier failed and bytes could not be stored or brought back.

    Raised by backward where bytes are lost, which a failed read means, and by a step at its end
    where ``on_error="raise"`` asks for it. The next step of the session works.

    Attributes:
        errno: the operating system's error number, or ``None`` where there is none.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class ModifiedInPlaceError(OffloadError):
    """A tensor saved for backward was modified in place before backward needed it.

    torch raises a plain ``RuntimeError`` for this; any saved-tensor hook switches its check off,
    so the session makes the check itself and raises this subclass of ``RuntimeError`` with the
    same meaning.
    """


class StateError(OffloadError):
    """Something was asked for in a state that does not allow it."""


class PlanError(OffloadError):
    """No plan fits the budgets, or a plan was made for another model.

    The message says what is needed at least, what sets that floor, and what to do.
    """


class SegmentError(PlanError, ValueError):
    """There is nothing to plan for: a model without parts or without one of a name, or a step that
    runs none.
    """


class StepError(OffloadError, ValueError):
    """A step cannot be measured: it saves nothing, runs no backward, or has nothing to move."""


class OrderError(OffloadError):
    """Two streams, or a stream and the host, use the same bytes and no event orders them.

    Only raised under ``OFFLOAD_CHECK=1``. It is a bug of this package: please report it.
    """


class OffloadWarning(UserWarning):
    """The step goes on, but not the way it was configured: the message says why and what to do."""


def warn_user(message: str) -> None:
    """Give an ``OffloadWarning`` that points at the user's line, not at ours or at torch's."""
    here = os.path.dirname(__file__)
    torch = os.path.dirname(getattr(sys.modules.get("torch"), "__file__", None) or here)
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith((here, torch)):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, OffloadWarning, stacklevel=level)
