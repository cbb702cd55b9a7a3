"""``offload.plan``: measures a few steps of a model, and says what to do with its activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from offload.config import Config
from offload.distributed.agreement import agreement_on
from offload.errors import PlanError, SegmentError
from offload.measure import expect_step
from offload.planner.applied import Planned, budgets_of
from offload.planner.auto import Auto, Study
from offload.planner.model import Chain
from offload.planner.needs import uniform_choice
from offload.planner.plan import Plan, make_plan
from offload.planner.predict import predict
from offload.planner.profile import Budgets
from offload.planner.solve import Solution, lower_bound, solve
from offload.report.scopes import expect_model
from offload.session import Session

__all__ = ["NO_LIMIT", "Measurement", "measure_model", "plan", "plan_from"]

_MOST_STEPS = 24  # until a plan has settled
NO_LIMIT = 1 << 50  # bytes: more than any device has
Size = int | str


@dataclass(frozen=True)
class Measurement:
    """A measured model, from which plans for any budget can be made.

    Attributes:
        study: what its steps took and saved.
        budgets: those it was measured under.
        signature: of its inputs.
    """

    study: Study
    budgets: Budgets
    signature: str
    _auto: Auto

    def chain(self, device_bytes: float) -> Chain:
        """The problem for another device budget."""
        return self._auto.chain_of(self.study, replace(self.budgets, device_bytes=device_bytes))

    def plan(self, device_bytes: float, *, solver: str = "search", seconds: float = 30.0) -> Plan:
        """The plan for a device budget.

        Raises:
            PlanError: none fits.
        """
        chain = self.chain(int(device_bytes))
        budgets = replace(self.budgets, device_bytes=int(device_bytes))
        solution = solve(chain, solver=solver, seconds=seconds)
        return make_plan(self.study.profile, budgets, chain, solution, self.signature)

    def uniform(self, action: str) -> Plan:
        """The plan of one action for every segment, within no limit of memory."""
        chain = self.chain(NO_LIMIT)
        choice = uniform_choice(chain, action)
        seconds = predict(chain, choice).seconds
        solution = Solution(choice, seconds, lower_bound(chain), 0.0, "given")
        budgets = replace(self.budgets, device_bytes=NO_LIMIT)
        return make_plan(self.study.profile, budgets, chain, solution, self.signature)

    @property
    def slow(self) -> str:
        """The tier next to the device."""
        return self.study.profile.slow

    @property
    def floor_bytes(self) -> int:
        """The least device budget with which a plan exists."""
        return self.study.profile.floor_bytes(self.budgets)

    @property
    def plain_bytes(self) -> int:
        """The peak with everything kept."""
        return self.plan(NO_LIMIT).plain_peak_bytes


def plan(
    model: nn.Module,
    step: Callable[[], object],
    *,
    device_budget: Size | None = None,
    host_budget: Size | None = None,
    disk_budget: Size | None = None,
    max_overhead: float | None = None,
    segments: Sequence[str] | None = None,
    solver: str = "search",
    **options: Any,
) -> Plan:
    """Measure a few steps and plan what becomes of the activations of each part of ``model``.

    The steps run under the leanest actions there are, so that measuring needs no more memory than
    computing one part after the other again. Gradients, buffers and random numbers are put back
    afterwards. Where ``torch.distributed`` has several ranks, all that share the model call it, and
    get one plan.

    Args:
        model: what is trained. Its repeated blocks are its segments, unless ``segments`` names
            others.
        step: runs one forward and backward of ``model``; called about ten times.
        device_budget: most bytes of device memory; see ``Config.device_budget``. May be left out
            where ``max_overhead`` is given: the least memory within it is found.
        host_budget: most bytes of host memory; the default is the session's.
        disk_budget: most bytes on the disk.
        max_overhead: most seconds over those with everything kept, as a part of those: 0.1 for a
            tenth more.
        segments: names of modules to plan for.
        solver: ``"search"``, or ``"exact"``, which needs scipy.
        **options: of the ``Session`` in which it is measured, and which should be that in which the
            plan is applied: ``disk_dir``, ``min_offload_bytes`` and so on.

    Returns:
        The plan; ``Session.apply(model, plan)`` puts it in force.

    Raises:
        PlanError: no plan fits, with what is needed at least and which segment needs it; or none
            within ``max_overhead``; or the model has no parts to plan for.
        TypeError, ValueError: an option that cannot work.

    Example:
        >>> import offload, torch
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(),
        ...                                     torch.nn.Linear(256, 64))
        >>> model = torch.nn.Sequential(*(block() for _ in range(4)))
        >>> x = torch.randn(256, 64)
        >>> step = lambda: model(x).square().mean().backward()
        >>> plan = offload.plan(model, step, device_budget="900KiB", min_offload_bytes=0)
        >>> with offload.Session(device_budget="900KiB", min_offload_bytes=0) as session:
        ...     with session.apply(model, plan):
        ...         with session.step() as done:
        ...             step()
        >>> done.report.peak_live_bytes <= 900 * 1024
        True
    """
    if device_budget is None and max_overhead is None:
        raise PlanError("give device_budget, or max_overhead to find the least one within it")
    if max_overhead is not None and not max_overhead >= 0:
        raise ValueError(f"max_overhead is {max_overhead}; give 0 or more, 0.1 for a tenth")
    limits = {"host_budget": host_budget, "disk_budget": disk_budget}
    options.update({name: value for name, value in limits.items() if value is not None})
    found = measure_model(model, step, device_budget=device_budget, segments=segments, **options)

    def made(_: object = None) -> Plan:
        return plan_from(found, device_budget is not None, max_overhead, solver)

    group = None if options.get("plan_scope") == "rank" else agreement_on(model, "plan")
    if group is None:
        return made()
    agreed = group.decide(None, made)
    if agreed is None:
        raise PlanError(f"ranks that share a model make one plan for it, and {group.over}")
    group.leave()
    return agreed


def plan_from(
    found: Measurement, limited: bool, max_overhead: float | None, solver: str = "search"
) -> Plan:
    """The plan for the budget that was measured under, or the leanest that is fast enough.

    Raises:
        PlanError: as ``plan`` does.
    """
    if limited:
        made = found.plan(found.budgets.device_bytes, solver=solver)
        if max_overhead is not None and made.overhead > max_overhead:
            raise PlanError(
                f"the best plan for this budget takes {made.overhead:.1%} more than with "
                f"everything kept, and max_overhead is {max_overhead:.1%}: raise one of them"
            )
        return made
    assert max_overhead is not None
    return _leanest(found, max_overhead, solver)


def _leanest(found: Measurement, max_overhead: float, solver: str) -> Plan:
    """The plan with the least memory that is fast enough, to a hundredth of what can be saved."""
    low, high = float(found.floor_bytes), float(found.plain_bytes) * 1.05 + 1
    best = found.plan(high, solver=solver)
    if best.overhead > max_overhead:
        raise PlanError(f"no plan takes at most {max_overhead:.1%} more than with everything kept")
    while high - low > 0.01 * found.plain_bytes:
        middle = (low + high) / 2
        try:
            tried = found.plan(middle, solver=solver)
        except PlanError:
            low = middle
            continue
        if tried.overhead <= max_overhead:
            best, high = tried, middle
        else:
            low = middle
    return best


def measure_model(
    model: nn.Module,
    step: Callable[[], object],
    *,
    device_budget: Size | None = None,
    segments: Sequence[str] | None = None,
    after_step: Callable[[Planned], object] | None = None,
    **options: Any,
) -> Measurement:
    """Run ``step`` until its plan has settled, and keep what was measured.

    Args:
        model: as for ``plan``, like all that is not explained here.
        step: runs a forward and backward.
        device_budget: to measure under; ``None``: without a limit.
        segments: names of modules.
        after_step: called after each step.
        **options: of the session.
    """
    expect_model(model)
    expect_step(step)
    if isinstance(options.get("config"), Config):
        raise TypeError("give the options of the session by name, not as a Config")
    with undisturbed(model), Session(device_budget=device_budget, **options) as session:
        budget = session.config.device_budget
        limit = budget if budget is not None else NO_LIMIT
        planned = session.apply(model, "auto", segments=segments, device_budget=limit)
        with planned:
            auto = planned.auto
            assert auto is not None
            for _ in range(_MOST_STEPS):
                with session.step():
                    step()
                if after_step is not None:
                    after_step(planned)
                if auto.settled:
                    break
            study = auto.newest
            if study is None or study.plan is None:
                raise SegmentError(
                    "the step could not be measured: it has to run a forward of the model and a "
                    "backward that reaches its segments, the same ones each time, with inputs of "
                    "the same shapes; none is reached where their results are detached or need no "
                    "gradient"
                )
            budgets = budgets_of(session._tiers, limit)
            return Measurement(study, budgets, study.plan.signature, auto)


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Afterwards gradients, buffers and random numbers are what they were."""
    gradients = [(p, p.grad) for p in model.parameters()]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with torch.random.fork_rng(devices=_devices(model)):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _devices(model: nn.Module) -> list[int]:
    found = {p.device for p in model.parameters() if p.device.type == "cuda"}
    return sorted(d.index for d in found if d.index is not None)
