"""Trials: steps that are really run, plain, recomputed or under a session, timed and metered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import attrs
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.config import Config
from offload.measure import activation_meter
from offload.planner.segments import repeated_blocks
from offload.report import StepReport
from offload.session import Session
from offload.step import Step
from offload.tensors.live import LiveBytesMeter
from offload.tuner.record import StepRecord, record_step, with_releases
from offload.tuner.setting import Setting
from offload.tuner.stopwatch import Stopwatch

__all__ = ["Runner", "TimedSteps", "recomputing"]

Context = Callable[[], AbstractContextManager[Any]]


@dataclass
class TimedSteps:
    """Steps of one kind, and the plain ones between them.

    Attributes:
        seconds: of the timed steps.
        plain_seconds: of the plain steps that alternated with them.
        peak_live_bytes: most bytes alive: of saved storages and staging memory on the CPU, of all
            that a step allocates on an accelerator.
        report: the session's for the last step; None without a session.
    """

    seconds: list[float] = field(default_factory=list)
    plain_seconds: list[float] = field(default_factory=list)
    peak_live_bytes: int = 0
    report: StepReport | None = None

    @property
    def best_seconds(self) -> float:
        """Of the fastest step: other work on the machine only adds time, and few steps are run."""
        return min(self.seconds)

    @property
    def ratio(self) -> float:
        """Of the fastest step to the fastest plain one in between."""
        return self.best_seconds / min(self.plain_seconds)


class Runner:
    """Runs the steps of one target.

    Args:
        step: one forward and backward.
        model: what it trains, if known; its parameters and buffers do not count as activations.
        config: everything of a session but the setting under trial.
        stopwatch: tells how long a step takes.
        repeats: timed steps of a trial, each after a plain one.
    """

    def __init__(
        self,
        step: Callable[[], object],
        model: nn.Module | None,
        config: Config,
        stopwatch: Stopwatch,
        repeats: int,
    ) -> None:
        self.step = step
        self.model = model
        self._config = config
        self._stopwatch = stopwatch
        self._repeats = repeats

    def plain(self) -> TimedSteps:
        """Plain steps only; the first two are not timed, the second is metered."""
        self.step()
        peak_bytes = self._peak_bytes(nullcontext, activation_meter(self.model))
        measured = TimedSteps(peak_live_bytes=peak_bytes)
        for _ in range(self._repeats):
            measured.seconds.append(self._timed(nullcontext)[0])
        measured.plain_seconds = measured.seconds
        return measured

    def record(self) -> StepRecord:
        """What a plain step saves and asks for, and when."""
        record = record_step(self.step, self._config, self._stopwatch)
        if self._config.device.type != "cpu":
            return record
        return with_releases(record, self.step, self._config)

    def offloaded(self, setting: Setting) -> TimedSteps:
        """Under a session with ``setting``. The first step, from which the session learns the
        order of backward, is metered and not timed.
        """
        with Session(attrs.evolve(self._config, **setting.options())) as session:
            meter = activation_meter(self.model, session)
            measured = TimedSteps(peak_live_bytes=self._peak_bytes(session.step, meter))
            self._alternate(measured, session.step)
        return measured

    def recomputed(self) -> TimedSteps | None:
        """With torch's checkpoint around each of the model's repeated blocks; None if it has none.

        The first step is metered and not timed.
        """
        if self.model is None:
            return None
        blocks = [self.model.get_submodule(name) for name in repeated_blocks(self.model)]
        if not blocks:
            return None
        meter = activation_meter(self.model)
        context = partial(recomputing, blocks, meter)
        measured = TimedSteps(peak_live_bytes=self._peak_bytes(context, meter))
        self._alternate(measured, partial(recomputing, blocks, None))
        return measured

    def _alternate(self, measured: TimedSteps, context: Context) -> None:
        for _ in range(self._repeats):
            measured.plain_seconds.append(self._timed(nullcontext)[0])
            seconds, entered = self._timed(context)
            measured.seconds.append(seconds)
            measured.report = entered.report if isinstance(entered, Step) else None

    def _timed(self, context: Context) -> tuple[float, object]:
        self._stopwatch.begin()
        with context() as entered:
            self.step()
        return self._stopwatch.end_ns() / 1e9, entered

    def _peak_bytes(self, context: Context, meter: LiveBytesMeter) -> int:
        if self._config.device.type != "cpu":
            return self._peak_on_device(context)
        with context(), meter:
            self.step()
        return meter.peak_bytes

    def _peak_on_device(self, context: Context) -> int:
        torch.accelerator.synchronize()
        base_bytes = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        with context():
            self.step()
        torch.accelerator.synchronize()
        return torch.accelerator.max_memory_allocated() - base_bytes


# -- recomputation ---------------------------------------------------------------------------------


@contextmanager
def recomputing(blocks: Sequence[nn.Module], meter: LiveBytesMeter | None) -> Iterator[None]:
    """Let each of ``blocks`` be recomputed in backward by torch's checkpoint.

    Args:
        blocks: the modules; they are as before afterwards.
        meter: entered inside each region, as what is saved there is to be seen nowhere else.
    """
    before = [vars(block).get("forward") for block in blocks]
    for block in blocks:
        block.forward = partial(_recomputed, block.forward, meter)
    try:
        yield
    finally:
        for block, own in zip(blocks, before, strict=True):
            del block.forward
            if own is not None:
                block.forward = own


def _recomputed(
    forward: Callable[..., Any], meter: LiveBytesMeter | None, *args: Any, **kwargs: Any
) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with meter if meter is not None else nullcontext():
            return forward(*args, **kwargs)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)
