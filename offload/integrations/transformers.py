"""Hugging Face transformers: the Trainer's training steps in a session's steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from offload.session import Session

__all__ = ["run_in_steps"]


@contextlib.contextmanager
def run_in_steps(trainer: Any, session: Session) -> Iterator[None]:
    """Inside, every training step of ``trainer`` runs in a step of ``session``.

    A training step is the forward and backward of one batch, so that there are several to an
    update where gradients are accumulated. Evaluation and prediction save nothing and run as ever.
    A callback could not do it: it is not told of an error, and would leave its step open.

    With ``activation_checkpointing=True`` (``gradient_checkpointing=True`` in older versions) of
    the ``TrainingArguments`` the inputs of the layers are what is offloaded, whichever value
    ``use_reentrant`` has. Rules of ``Session.apply`` may be in force instead.

    Args:
        trainer: a ``transformers.Trainer``, also of a subclass such as those of TRL.
        session: stays open; its ``report()`` is of all steps.

    Raises:
        TypeError: ``trainer`` has no training steps.

    Example:
        >>> import torch, offload
        >>> class Trainer:  # as transformers.Trainer calls it
        ...     def training_step(self, x):
        ...         x.exp().sum().backward()
        ...     def train(self):
        ...         self.training_step(torch.ones(256, requires_grad=True))
        >>> trainer = Trainer()
        >>> with offload.Session(min_offload_bytes=0) as session, run_in_steps(trainer, session):
        ...     trainer.train()
        >>> session.report().steps
        1
    """
    plain = getattr(trainer, "training_step", None)
    if not callable(plain):
        raise TypeError(f"{trainer!r} has no training_step: give a transformers.Trainer")
    own = vars(trainer).get("training_step")

    @functools.wraps(plain)
    def training_step(*args: Any, **kwargs: Any) -> Any:
        with session.step():
            return plain(*args, **kwargs)

    trainer.training_step = training_step
    try:
        yield
    finally:
        if own is not None:
            trainer.training_step = own
        else:
            del trainer.training_step
