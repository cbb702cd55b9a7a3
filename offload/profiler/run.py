"""Runs a step many times, without and with offloading in turn, and looks closely at one more."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.blocks.placement import Policy, offload_all
from offload.config import Config
from offload.errors import OffloadError, StepError
from offload.measure import activation_meter, expect_step
from offload.profiler.result import MemoryCurve, Profile
from offload.profiler.timeline import Timeline
from offload.report import StepReport
from offload.report.scopes import expect_model
from offload.report.trace import Event, Sample, now_ns
from offload.session import Session
from offload.tensors.live import storage_of
from offload.units import format_bytes

__all__ = ["profile"]

_NOTHING = contextlib.nullcontext()
_LOOKS = 3  # at the memory of a plain and of an offloaded step


def profile(
    step: Callable[[], object],
    *,
    model: nn.Module | None = None,
    steps: int = 8,
    warmup: int = 2,
    name: str = "step",
    policy: Policy = offload_all,
    progress: Callable[[str], object] | None = None,
    **options: Any,
) -> Profile:
    """Measure what offloading costs ``step`` and what it hides, beside the same step without it.

    Plain and offloaded steps alternate in one process, so that both see the same machine. Three
    more of each are then run under a meter of the memory; the fastest are for the picture.
    ``Profile`` holds the medians, the spread, the report of the measured steps and the timeline; it
    makes no claim that the measurements do not carry.

    Args:
        step: runs one forward and its backward; called without arguments, outside any session.
        model: what it trains: waits are then told by module.
        steps: pairs that are measured; with fewer than 6 no claim is made.
        warmup: pairs that are run before, and left out.
        name: what the profile is called.
        policy: of the session.
        progress: called with what is being done, before each step.
        **options: of the session, as for ``offload.Session``.

    Raises:
        TypeError, ValueError: an argument or option that cannot work.
        StepError: there is nothing to measure: the step saves nothing, runs no backward, or
            nothing of it is offloaded; the message says what to do.
        OffloadError: there is no room for what it saves.
        Exception: whatever ``step`` raises.

    Example:
        >>> import torch
        >>> from offload.profiler import profile
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh())
        >>> x = torch.randn(256, 64)
        >>> found = profile(
        ...     lambda: model(x).sum().backward(),
        ...     model=model, steps=3, warmup=1, min_offload_bytes=0, keep_last_bytes=0,
        ... )
        >>> found.report.steps, found.verdict.pairs, found.verdict.is_claimed
        (3, 3, False)
    """
    _check(step, model, steps, warmup)
    tell = progress if progress is not None else lambda doing: None
    tell("looking at what is saved")
    largest_bytes = _largest_saved(step, model)
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(Session(policy=policy, **options))
        if model is not None:
            stack.enter_context(session.watch(model))  # its hooks run in plain steps as well
        runner = _Runner(step, session)
        for number in range(warmup):
            tell(f"warm-up {number + 1} of {warmup}")
            runner.pair(number)
        tell("looking at what is moved")
        _check_moves(runner.offloaded().report, largest_bytes, session.config)
        pairs = []
        session.trace.clear()
        for number in range(steps):
            tell(f"pair {number + 1} of {steps}")
            pairs.append(runner.pair(number))
        events = session.trace.events()
        samples = session.trace.samples()
        tell("memory")
        plain_curve, offloaded_curve, shown = _metered(runner, model)
    host_copies = session.config.device.type == "cpu"
    return Profile(
        name=name,
        device=str(session.config.device),
        options={k: str(v) for k, v in options.items()},
        warmup=warmup,
        plain_seconds=tuple((end_ns - start_ns) / 1e9 for (start_ns, end_ns), _ in pairs),
        offloaded_seconds=tuple(offloaded.seconds for _, offloaded in pairs),
        reports=tuple(offloaded.report for _, offloaded in pairs),
        plain_steps=tuple(span for span, _ in pairs),
        timeline=Timeline.of(events, samples, host_copies=host_copies),
        shown=Timeline.of(*shown, host_copies=host_copies),
        plain_memory=plain_curve,
        offloaded_memory=offloaded_curve,
    )


# -- one step after the other ---------------------------------------------------------------------


class _Offloaded(NamedTuple):
    """One offloaded step, with all that it had left in flight."""

    seconds: float
    report: StepReport


_Pair = tuple[tuple[int, int], _Offloaded]  # from when to when the plain step ran, and the other


class _Runner:
    def __init__(self, step: Callable[[], object], session: Session) -> None:
        self._step = step
        self.session = session
        self._device = session.config.device

    def pair(self, number: int) -> _Pair:
        """A plain and an offloaded step; who goes first alternates, as a drift would favour one."""
        if number % 2:
            offloaded = self.offloaded()
            return self.plain(), offloaded
        return self.plain(), self.offloaded()

    def plain(self, inside: AbstractContextManager[object] = _NOTHING) -> tuple[int, int]:
        """One step without offloading; from when to when."""
        self._synchronize()
        start_ns = now_ns()
        with inside:
            self._step()
        self._synchronize()
        return start_ns, now_ns()

    def offloaded(self, inside: AbstractContextManager[object] = _NOTHING) -> _Offloaded:
        """One step of the session. What it leaves in flight is seen out, but not timed: it would
        disturb the plain step that follows.
        """
        self._synchronize()
        start = time.perf_counter()
        with self.session.step() as step, inside:
            self._step()
        self._synchronize()
        seconds = time.perf_counter() - start
        self.session.drain()
        return _Offloaded(seconds, step.report)

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize()


# -- one more step, closely ------------------------------------------------------------------------


_Trace = tuple[list[Event], list[Sample]]


def _metered(runner: _Runner, model: nn.Module | None) -> tuple[MemoryCurve, MemoryCurve, _Trace]:
    """The memory of a plain and of an offloaded step, and the trace of the latter: the fastest of
    a few each, as a picture should not show what else the machine did.
    """
    plain = min((_plain_curve(runner, model) for _ in range(_LOOKS)), key=lambda c: c.seconds)
    looks = [_offloaded_curve(runner, model) for _ in range(_LOOKS)]
    offloaded, trace = min(looks, key=lambda look: look[0].seconds)
    return plain, offloaded, trace


def _plain_curve(runner: _Runner, model: nn.Module | None) -> MemoryCurve:
    points: list[tuple[int, int]] = []
    meter = activation_meter(
        model, observer=lambda alive_bytes: points.append((now_ns(), alive_bytes))
    )
    return MemoryCurve.of(points, *runner.plain(meter))


def _offloaded_curve(runner: _Runner, model: nn.Module | None) -> tuple[MemoryCurve, _Trace]:
    session = runner.session
    points: list[tuple[int, int]] = []
    meter = activation_meter(
        model,
        session if session.config.device.type == "cpu" else None,  # whose host memory counts
        observer=lambda alive_bytes: points.append((now_ns(), alive_bytes)),
    )
    session.trace.clear()
    start_ns = now_ns()
    taken = runner.offloaded(meter)
    curve = MemoryCurve.of(points, start_ns, start_ns + int(1e9 * taken.seconds))
    return curve, (session.trace.events(), session.trace.samples())


def _largest_saved(step: Callable[[], object], model: nn.Module | None) -> int:
    """The size of the largest storage that ``step`` saves and that is no parameter's; this first
    step also makes gradients and caches.

    Raises:
        StepError: it saves nothing, or runs no backward.
    """
    own = {s._cdata for p in _tensors_of(model) if (s := storage_of(p)) is not None}
    sizes: list[int] = []
    asked = 0

    def pack(tensor: Tensor) -> Tensor:
        storage = storage_of(tensor)
        if storage is not None and storage._cdata not in own:
            sizes.append(storage.nbytes())
        return tensor.detach()

    def unpack(tensor: Tensor) -> Tensor:
        nonlocal asked
        asked += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        step()
    if not sizes:
        raise StepError(
            "the step saves nothing for backward: run a forward whose parameters or inputs require "
            "gradients, not under torch.no_grad()"
        )
    if not asked:
        raise StepError(
            "the step ran no backward over what it saved: call loss.backward() inside the step"
        )
    return max(sizes)


def _tensors_of(model: nn.Module | None) -> Iterator[Tensor]:
    if model is not None:
        yield from model.parameters()
        yield from model.buffers()


def _check(step: object, model: object, steps: int, warmup: int) -> None:
    expect_step(step)
    if model is not None:
        expect_model(model)
    if steps < 1 or warmup < 0:
        raise ValueError(
            f"steps={steps}, warmup={warmup}: give at least 1 step and no fewer than 0 to warm up"
        )


def _check_moves(report: StepReport, largest_bytes: int, config: Config) -> None:
    """Raise ``OffloadError`` if a step offloads nothing: there is nothing to measure."""
    if report.offloaded_bytes:
        return
    threshold_bytes = config.min_offload_bytes
    if largest_bytes < threshold_bytes:
        raise StepError(
            f"nothing is offloaded: the largest storage saved has {format_bytes(largest_bytes)}, "
            f"less than min_offload_bytes ({format_bytes(threshold_bytes)}); lower it, to "
            f"{max(1, largest_bytes // 4)} for instance"
        )
    if report.kept_bytes.get("budget") or report.kept_bytes.get("error"):
        why = "; ".join(report.warnings) or "raise disk_budget or host_budget"
        raise OffloadError(f"nothing is offloaded, as there is no room for it: {why}")
    bundled_bytes = report.kept_bytes.get("bundle", 0)
    if bundled_bytes and not report.saved_bytes:
        raise StepError(
            f"nothing is offloaded: the {format_bytes(bundled_bytes)} of small storages do not "
            f"fill a bundle ({format_bytes(config.bundled_bytes)}); lower bundle_bytes, to 0 for "
            "instance"
        )
    if report.saved_bytes:
        raise StepError(
            f"nothing is offloaded: all {format_bytes(report.saved_bytes)} stay, as the newest "
            f"{format_bytes(config.keep_last_bytes)} do; lower keep_last_bytes, to 0 for instance"
        )
    kept = ", ".join(f"{format_bytes(n)} {why}" for why, n in report.kept_bytes.items() if n)
    raise StepError(f"nothing is offloaded; kept are {kept or 'no bytes'}: see StepReport")
