"""Fixed: goes by a plan that was made before."""

from __future__ import annotations

from offload.errors import warn_user
from offload.planner.plan import Plan
from offload.planner.record import Assignment, Measured, Pass
from offload.report import Counters
from offload.report.trace import total_ns

__all__ = ["Fixed", "assignment_of", "measured_of"]


class Fixed:
    """The scheme of a plan that was made before."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.measured: list[Measured] = []
        self._assignment = assignment_of(plan)
        self._told = self._told_of_others = False

    def assign(self, signature: str) -> Assignment:
        if signature != self.plan.signature and not self._told:
            self._told = True
            warn_user(
                f"the plan was made for inputs {self.plan.signature}, and these are {signature}: "
                'its budget is kept, its predictions do not hold; apply "auto" plans for each'
            )
        return self._assignment

    def finished(self, done: Pass, counters: Counters) -> None:
        if done.in_flight > self.plan.in_flight and not self._told_of_others:
            self._told_of_others = True
            warn_user(
                f"{done.in_flight} forwards wait for their backward at one time, and the plan was "
                f"made for {self.plan.in_flight}: its budget is kept, its predictions do not hold; "
                'apply "auto", or measure a plan in such steps'
            )
        if done.complete:
            self.measured.append(measured_of(done, counters))


def assignment_of(plan: Plan) -> Assignment:
    """A plan as a controller wants it."""
    return Assignment(
        plan.actions,
        plan.limits,
        plan.gap_actions,
        # What nobody has planned for runs as leanly as can be.
        default="recompute+disk" if plan.device == "cpu" else "recompute+host",
        needs=plan.needs,
        limit_bytes=int(plan.budgets.device_bytes),
        spare_bytes=int(plan.budgets.device_bytes) - plan.peak_bytes + plan.before_bytes,
    )


def measured_of(done: Pass, counters: Counters) -> Measured:
    """What came of a pass under a plan."""
    return Measured(
        step=counters.started_ns,
        seconds=done.seconds([]),
        peak_bytes=done.peak_bytes or counters.peak_live_bytes,
        stall_seconds=(counters.stall_ns + counters.backpressure_ns) / 1e9,
        misses=counters.misses + counters.lates,
        moved_bytes=counters.offloaded_bytes,
        evicted_bytes=counters.evicted_bytes,
        transfer_seconds=total_ns(counters.transfers) / 1e9,
    )
