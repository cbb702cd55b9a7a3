"""Lightning: every training batch in a session's step."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from offload.session import Session
from offload.step import Step

__all__ = ["step_callback"]

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")  # one library under two names


def step_callback(session: Session) -> Any:
    """A callback for Lightning's ``Trainer`` that runs every training batch in a step of
    ``session``: forward, backward and, in the same breath, the optimizer, which saves nothing.

    Automatic and manual optimization, accumulated gradients and precision plugins are as ever. A
    step is closed as well when a batch is skipped or fails.

    Args:
        session: stays open; its ``report()`` is of all steps. It cannot go to another process: with
            a strategy that starts processes, open it in each.

    Returns:
        a ``lightning.pytorch.Callback``, or one of ``pytorch_lightning`` where that is in use.

    Raises:
        ImportError: Lightning is not installed.
    """
    return _made(_callback_class(), session)


class _Steps:
    """What the callback does; Lightning calls these."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._step: Step | None = None

    def on_train_batch_start(self, *_: Any) -> None:
        self._close()
        step = self._session.step()
        step.__enter__()
        self._step = step

    def on_train_batch_end(self, *_: Any) -> None:
        self._close()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._close()  # the last batch was skipped

    def on_train_end(self, *_: Any) -> None:
        self._close()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self._close(type(exception), exception)

    def _close(
        self, kind: type[BaseException] | None = None, exc: BaseException | None = None
    ) -> None:
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(kind, exc, None)


def _made(base: Any, session: Session) -> Any:
    return type("StepCallback", (_Steps, base), {"__doc__": step_callback.__doc__})(session)


def _callback_class() -> Any:
    imported = [name for name in _PACKAGES if name in sys.modules]
    for name in (*imported, *_PACKAGES):
        try:
            return importlib.import_module(name).Callback
        except ModuleNotFoundError as e:
            if e.name not in (name, name.partition(".")[0]):
                raise  # it is there, and something that it needs is not
    raise ImportError(
        "Lightning is not installed: pip install lightning, or offload[integrations] for all "
        "frameworks that offload works with"
    )
