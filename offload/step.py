"""Step: one training step, in which a session's hooks are active."""

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol

import torch

from offload.config import Config
from offload.errors import StateError, StorageError
from offload.hooks import HookPair, Hooks, is_of_checkpoint
from offload.recompute.verify import Verifier
from offload.report import Counters, StepReport
from offload.trace import ranged

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Owner(Protocol):
    """What a step needs of its session."""

    config: Config
    _hooks: Hooks
    _verifier: Verifier | None
    _running: threading.local

    def _running_step(self) -> Counters | None: ...

    def _begin(self, counters: Counters) -> None: ...

    def _end(self, counters: Counters) -> StorageError | None: ...


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
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._pair: HookPair | None = None
        self._thread = 0

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
        if self._counters is not None:
            raise StateError("a step is entered once; call session.step() for each")
        self._thread = threading.get_ident()
        self._counters = self._session._running_step()
        self._outermost = self._counters is None
        if self._counters is None:
            Step.entered += 1
            counters = Counters()
            self._session._begin(counters)
            self._range = ranged("offload::step")
            self._range.__enter__()
            self._counters = self._session._running.counters = counters
        outer = _top_hooks(False)
        # Nested in a step of the same session, that one does the work. Not within a checkpointed
        # function, as checkpoint's own pair is above: there each step has to act alike in the
        # forward and when it is computed again, wherever the backward is.
        if self._outermost or is_of_checkpoint(outer):
            self._pair = self._session._hooks.pair(outer)
            self._hooks = torch.autograd.graph.saved_tensors_hooks(*self._pair)
            self._hooks.__enter__()
        if self._outermost and self._session._verifier is not None:
            self._session._verifier.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        if self._hooks is None:
            return
        assert self._counters is not None
        # torch pops whatever pair is on top: in the wrong order that would be somebody else's.
        if threading.get_ident() != self._thread:
            raise StateError(
                "a step must be left on the thread that entered it; its hooks are active there"
            )
        if _top_hooks(False) != self._pair:
            raise StateError(
                "a step was left while hooks entered inside it are still active: leave contexts in "
                "the reverse order of entering them"
            )
        self._hooks.__exit__(exc_type, exc, tb)
        if not self._outermost:
            return
        self._session._running.counters = None
        self._range.__exit__(exc_type, exc, tb)
        try:
            error = self._session._end(self._counters)  # it may warn, and a warning may raise
        finally:
            if self._session._verifier is not None:
                self._session._verifier.__exit__(exc_type, exc, tb)
        if error is not None and self._session.config.on_error == "raise" and exc is None:
            raise error
