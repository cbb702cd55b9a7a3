"""Planned: a plan, or the planner itself, in force on a model and a session."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Sequence

from torch import nn

from offload.distributed.agreement import agreement_on
from offload.errors import PlanError, SegmentError
from offload.hooks.pack import Hooks
from offload.planner.auto import Auto
from offload.planner.control import Controller
from offload.planner.fixed import Fixed
from offload.planner.plan import Plan
from offload.planner.profile import Budgets
from offload.planner.rates import remembered_links
from offload.planner.record import Measured
from offload.planner.segments import find_segments
from offload.report import Counters
from offload.report.tables import FigureTable, text_of
from offload.tiers import Tiers
from offload.units import format_bytes, format_seconds

__all__ = ["Planned", "budgets_of"]

_NEWEST = 5  # measured steps that a comparison is made from


class Planned:
    """Made by ``Session.apply(model, plan)`` and ``Session.apply(model, "auto")``.

    It is in force until ``remove()`` or the end of its context. ``print`` shows what was predicted
    beside what was measured.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan | str,
        hooks: Hooks,
        tiers: Tiers,
        in_step: Callable[[], bool],
        removed: Callable[[], None],
        *,
        segments: Sequence[str] | None = None,
        device_budget: int | None = None,
    ) -> None:
        self._removed = removed
        self._scheme: Fixed | Auto
        if isinstance(plan, Plan):
            names = _names_of(plan, model)
            self._scheme = Fixed(plan)
        else:
            names = find_segments(model, segments)
            config = tiers.common.config
            budgets = budgets_of(tiers, device_budget)
            alone = config.plan_scope == "rank"
            self._scheme = Auto(
                budgets,
                slow="disk" if tiers.common.lane.host_is_device else "host",
                min_offload_bytes=max(1, config.min_offload_bytes),
                group=None if alone else agreement_on(model, ", ".join(names)),
                links=remembered_links(config),
            )
        self._is_removed = False
        self._tiers = tiers
        self._controller = Controller(model, names, hooks, tiers, in_step, self._scheme)

    @property
    def auto(self) -> Auto | None:
        """What measures and plans; ``None`` for a plan that was made before."""
        return self._scheme if isinstance(self._scheme, Auto) else None

    @property
    def plan(self) -> Plan | None:
        """What is in force; ``None`` while the first steps are measured."""
        return self._scheme.plan

    @property
    def measured(self) -> list[Measured]:
        """The passes under a plan so far, of the newest shape of input."""
        return self._scheme.measured

    def begin_step(self, counters: Counters) -> None:
        """Called by the session."""
        self._controller.begin_step(counters)
        if self.auto is not None:
            self.auto.begin_step()

    def end_step(self) -> None:
        """Called by the session."""
        self._controller.end_step()

    def remove(self) -> None:
        """Make model and session what they were. May be called twice; a session that closes does
        it.
        """
        if self._is_removed:
            return
        try:
            if self.auto is not None and not self._tiers.in_child:
                self.auto.leave()  # other ranks are to wait for this one no more
        finally:
            self._controller.remove()
            self._removed()
            self._is_removed = True  # last: an interrupt may have come before

    def __enter__(self) -> Planned:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> FigureTable:
        """Predicted beside measured, the median of the newest steps, as a ``rich`` table."""
        table = FigureTable(title="plan, predicted and measured")
        table.add_column()
        table.add_figures("predicted", "measured")
        plan, newest = self.plan, self.measured[-_NEWEST:]
        if plan is None or not newest:
            table.add_row("nothing yet", "", "")
            return table

        def median(name: str) -> float:
            return float(statistics.median(getattr(m, name) for m in newest))

        stalls = sum(row.stall_seconds for row in plan.rows)
        busy = median("transfer_seconds")
        moved = 2 * median("moved_bytes")
        peak = median("peak_bytes")
        rows = [
            ("step", format_seconds(plan.seconds), format_seconds(median("seconds"))),
            ("peak", format_bytes(plan.peak_bytes), format_bytes(peak) if peak else "unknown"),
            ("leaves", format_bytes(plan.offloaded_bytes), format_bytes(median("moved_bytes"))),
            ("waits", format_seconds(stalls), format_seconds(median("stall_seconds"))),
            ("late", "0", f"{median('misses'):.0f}"),
            ("moved", "", f"{moved / busy / 1e9:.2f} GB/s" if busy else "nothing"),
        ]
        for row in rows:
            table.add_row(*row)
        return table


def _names_of(plan: Plan, model: nn.Module) -> list[str]:
    """The plan's segments, as modules of this model, and others of their kind."""
    names = list(dict.fromkeys(key.partition("#")[0] for key in plan.actions))
    present = {name for name, _ in model.named_modules(remove_duplicate=False)}
    missing = [name for name in names if name not in present]
    if missing:
        raise PlanError(
            f"the plan is for a model with a module {missing[0]!r}, which this one has not "
            f"({len(missing)} of its {len(names)} segments are missing): make a plan for this model"
        )
    with contextlib.suppress(SegmentError):
        found = find_segments(model)
        if set(names) <= set(found):  # some took no part in the steps that it was made from
            return found
    return names


def budgets_of(tiers: Tiers, device_budget: int | None) -> Budgets:
    """What a plan may use in a session.

    Raises:
        PlanError: neither the session nor the caller limits device memory.
    """
    config = tiers.common.config
    limit = device_budget if device_budget is not None else config.device_budget
    if limit is None:
        raise PlanError(
            "a plan needs a budget of device memory: open the session with "
            'Session(device_budget="8GiB"), or device_budget="auto"'
        )
    on_cpu = tiers.common.lane.host_is_device
    return Budgets(
        device_bytes=limit,
        host_bytes=config.arena_bytes if not on_cpu else float("inf"),
        disk_bytes=tiers.disk.store.limit_bytes,
        window_bytes=tiers.outbound.window.limit_bytes,
        prefetch_bytes=config.prefetch_bytes,
    )
