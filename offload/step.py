"""Step: one training step, in which a session's hooks are active.

[Note: left whatever happens] An interrupt (Ctrl-C) is raised between any two lines, also of those
that enter and leave a step; a pair of hooks that stayed active would take what other code saves. So
what was begun is undone by lines that may run again where they were broken off. There is one place
where none of ours can: the first moment of ``__exit__`` itself, before its ``try``. So what a
``with`` statement holds on to while its block runs is an object whose end undoes what is left.
"""

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch

from offload.config import Config
from offload.errors import StateError, StorageError
from offload.hooks.pack import Hooks, is_of_checkpoint
from offload.recompute.verify import Verifier
from offload.report import Counters, StepReport
from offload.report.trace import ranged
from offload.tensors.live import HookPair

_top_hooks: Callable[[bool], HookPair | None]
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks


class Running(threading.local):
    """Of one session, the step that a thread is in."""

    counters: Counters | None = None


class Owner(Protocol):
    """What a step needs of its session."""

    config: Config
    _hooks: Hooks
    _verifier: Verifier | None
    _running: Running

    def _running_step(self) -> Counters | None: ...

    def _begin(self, counters: Counters) -> None: ...

    def _end(self, counters: Counters) -> StorageError | None: ...


class _Leaving:
    """``__exit__`` of a step."""

    def __get__(self, step: "Step | None", owner: type) -> Any:
        if step is None:
            return _leave
        leave = functools.partial(_leave, step)  # as such it is held by no frame of a traceback
        if not step._thread:  # later it is no ``with`` statement that asks
            step._held = weakref.ref(leave, lambda _: step._close())
        return leave


class Step:
    """One training step of a session: a context manager, and afterwards its ``report``.

    ``entered`` counts the steps of all sessions in this process.
    """

    entered = 0

    def __init__(self, session: Owner) -> None:
        self._session = session
        self._counters: Counters | None = None
        self._outermost = False
        self._range: AbstractContextManager[object] = nullcontext()
        self._pair: HookPair | None = None  # while they are, or may be, active
        self._thread = 0
        self._verifies = False
        self._error: StorageError | None = None
        self._held: weakref.ref[Any] | None = None  # what a ``with`` statement holds

    @property
    def report(self) -> StepReport:
        """The figures of this step so far; a backward after the block still adds to them.

        Raises:
            StateError: the step was never entered.
        """
        if self._counters is None:
            raise StateError(
                "the step has no report yet: enter it first (with session.step() as step: ...)"
            )
        return StepReport.of([self._counters])

    def __enter__(self) -> "Step":
        if self._thread:
            raise StateError("a step is entered once; call session.step() for each")
        try:
            self._thread = threading.get_ident()
            self._open()
            return self
        except BaseException:
            self._close()
            raise

    if TYPE_CHECKING:

        def __exit__(
            self,
            exc_type: type[BaseException] | None,
            exc: BaseException | None,
            tb: TracebackType | None,
        ) -> None: ...

    else:
        __exit__ = _Leaving()

    def _open(self) -> None:
        session = self._session
        self._counters = session._running_step()
        self._outermost = self._counters is None
        if self._counters is None:
            Step.entered += 1
            counters = self._counters = Counters()
            session._begin(counters)
            around = ranged("offload::step")
            around.__enter__()
            self._range = around
            session._running.counters = counters
        outer = _top_hooks(False)
        # Nested in a step of the same session, that one does the work. Not within a checkpointed
        # function, as checkpoint's own pair is above: there each step has to act alike in the
        # forward and when it is computed again, wherever the backward is.
        if self._outermost or is_of_checkpoint(outer):
            self._pair = session._hooks.pair(outer)
            _push_hooks(*self._pair)
        if self._outermost and session._verifier is not None:
            self._verifies = True
            session._verifier.__enter__()

    def _close(self) -> None:
        """Undo what ``_open`` did, or has begun to do. See Note: left whatever happens."""
        session = self._session
        if threading.get_ident() != self._thread:
            return
        if self._pair is not None:
            _unwind(self._pair)
            self._pair = None
        self._held = None
        counters = self._counters
        if not self._outermost or counters is None:
            return
        if session._running.counters is counters:
            session._running.counters = None
        around, self._range = self._range, nullcontext()
        around.__exit__(None, None, None)
        try:
            # It may warn, and a warning may raise.
            self._error = session._end(counters) or self._error
        finally:
            if self._verifies and session._verifier is not None:
                session._verifier.__exit__()
                self._verifies = False


def _leave(
    step: Step,
    exc_type: type[BaseException] | None = None,
    exc: BaseException | None = None,
    tb: TracebackType | None = None,
) -> None:
    if step._pair is None:
        return
    # torch pops whatever pair is on top: in the wrong order that would be somebody else's.
    if threading.get_ident() != step._thread:
        raise StateError(
            "a step must be left on the thread that entered it; its hooks are active there"
        )
    if exc is None and _top_hooks(False) != step._pair:
        raise StateError(
            "a step was left while hooks entered inside it are still active: leave contexts in "
            "the reverse order of entering them"
        )
    try:
        step._close()
    finally:
        step._close()  # what an interrupt has kept the first from
    error = step._error
    if error is not None and step._session.config.on_error == "raise" and exc is None:
        # Not the one that is kept here and by the tiers: a traceback holds the frames that it has
        # passed, and with them graphs.
        raise StorageError(str(error), error.errno)


def _unwind(pair: HookPair) -> None:
    """Take ``pair`` from the active hooks, with what is above it: entered inside of the step, and
    left behind by what an exception broke off.
    """
    above: list[HookPair] = []
    while (top := _top_hooks(False)) is not None:
        _pop_hooks()
        if top == pair:
            return
        above.append(top)
    for other in reversed(above):  # it was not among them
        _push_hooks(*other)
