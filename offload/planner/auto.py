"""Auto: measures a model in its first steps, plans, and plans again when things change.

The first passes with a shape of input are training steps like any other, run under the leanest
actions: everything recomputed from inputs that left the device, then only what is cheap recomputed,
then everything offloaded. What they take and save is the profile; the plan follows from it. Passes
under a plan are measured as well, so that what could only be estimated (keeping) is known; the plan
is made again with that. Later it is made again where backward keeps waiting for bytes that the plan
said would be there in time (as Capuchin does on late swaps: Peng et al., ASPLOS 2020), where the
budget was passed, and where plain recomputation was measured to be faster.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from offload.distributed.agreement import Agreement
from offload.errors import PlanError, warn_user
from offload.planner.fixed import assignment_of, measured_of
from offload.planner.joint import News, together
from offload.planner.model import Chain, Links
from offload.planner.needs import fits_under, needs_under, spare_under, uniform_choice
from offload.planner.plan import Plan, make_plan
from offload.planner.predict import predict
from offload.planner.profile import MARGIN, Budgets, ModelProfile
from offload.planner.rates import measured_links
from offload.planner.record import Assignment, Measured, Pass
from offload.planner.solve import Solution, check_floor, solve
from offload.report import Counters
from offload.report.trace import merged
from offload.units import format_bytes, format_seconds

__all__ = ["Auto", "Study"]

_ESTIMATING = 2  # plans that are made to measure what could only be estimated
_YOUNG = 8  # passes under plans whose peak is looked at
_PATIENCE = 3  # passes in a row that wait, before a plan is made again
_REPLANS = 5  # for one shape
_WAITING = 0.05  # of a pass, beyond the predicted stalls
_SLOWER = 1.05  # than everything recomputed: then that
_SELDOM = 16  # steps from one decision of several ranks to the next, once a plan has proved itself


@dataclass
class Study:
    """All that is known for one shape of input."""

    profile: ModelProfile
    phase: int = 0
    plan: Plan | None = None
    plans: int = 0
    waited: int = 0
    margin_bytes: int = 0
    lean_seconds: float = float("inf")
    measured: list[Measured] = field(default_factory=list)
    judged: int = -1  # the step in which the plan was made, or judged last
    fell_back: bool = False
    begun: int = 0  # how often it was measured from the start


class Auto:
    """The scheme that measures and plans. See the module's text.

    Args:
        budgets: what a plan may use.
        slow: the tier next to the device.
        min_offload_bytes: what is smaller stays.
        links: rates of ways over which the measured steps send nothing.
        group: the ranks that share the model. They decide together, when a step begins; see Note:
            ranks act alike.
    """

    def __init__(
        self,
        budgets: Budgets,
        *,
        slow: str,
        min_offload_bytes: int,
        links: Links | None = None,
        group: Agreement | None = None,
    ) -> None:
        self.budgets = budgets
        self.studies: dict[str, Study] = {}
        self.newest: Study | None = None
        self._slow = slow
        self._least_bytes = min_offload_bytes
        self._given = links or Links()
        again, some = f"recompute+{slow}", f"selective+{slow}"
        # Twice each: the first of a kind meets cold caches, and memory that was never touched.
        # What passes through is looked at where it is in the device's own memory.
        kinds = [(again, True), (some, True), (slow, slow == "disk")]
        self._phases = [kind for kind in kinds for _ in range(2)]
        self._group = group
        self._own = self._fresh()  # of several ranks, what this one has seen
        self._news: News | None = None
        self._largest_bytes = 0  # of inputs
        self._steps = 0  # since the last decision, that ran a forward
        self._has_run = False  # a forward, in this step

    @property
    def plan(self) -> Plan | None:
        """For the newest shape of input, once there is one."""
        return self.newest.plan if self.newest is not None else None

    @property
    def measured(self) -> list[Measured]:
        """The passes under a plan so far, of the newest shape of input."""
        return self.newest.measured if self.newest is not None else []

    @property
    def settled(self) -> bool:
        """Whether the newest shape's plan only changes for a reason from now on."""
        study = self.newest
        return study is not None and study.plan is not None and study.plans > _ESTIMATING

    def begin_step(self) -> None:
        """Of several ranks: take part in their decision, if one is due."""
        self._steps += self._has_run
        self._has_run = False
        study = self.newest
        if self._group is None or study is None or self._group.over:
            return
        proved = self.settled and len(study.measured) >= _YOUNG
        if self._steps >= (_SELDOM if proved else 1):
            self._steps = 0
            self._decide(self._group)

    def leave(self) -> None:
        """The other ranks are to count on this one no more."""
        if self._group is not None:
            self._group.leave()

    def assign(self, signature: str) -> Assignment:
        self._has_run = True
        key = signature if self._group is None else ""  # see Note: ranks act alike
        study = self.studies.get(key)
        if study is None:
            study = self.studies[key] = self._fresh()
        self.newest = study
        if study.plan is not None:
            young = len(study.measured) < _YOUNG
            return replace(assignment_of(study.plan), watch_peak=young)
        action, record = self._phases[study.phase]
        known = bool(study.profile.segments)
        return Assignment(
            dict.fromkeys(study.profile.keys, action),
            default=self._phases[0][0],
            gap_default="disk" if self._slow == "disk" else "keep",
            needs=needs_under(study.profile, self.budgets, action) if known else (),
            limit_bytes=int(self.budgets.device_bytes),
            spare_bytes=spare_under(study.profile, self.budgets, action) if known else None,
            record=record,
            select=study.phase == 0,  # the pass after it takes the times
        )

    def finished(self, done: Pass, counters: Counters) -> None:
        if self._group is not None:
            self._note(done, counters)
            return
        study = self.studies.get(done.signature)
        if study is None or not study.profile.learn(done):
            return
        if study.plan is None:
            self._note_lean(study, done, counters)
            study.judged = counters.started_ns
            # Of several in flight, some may go by what was measured before.
            if all(v.action == self._phases[study.phase][0] for v in done.visits):
                self._next_phase(study, done.signature)
        else:
            found = measured_of(done, counters)
            self._judge(study, found, done.signature, lambda: self._rates(counters, Links()))

    # -- several ranks ----------------------------------------------------------------------------

    def _note(self, done: Pass, counters: Counters) -> None:
        """Keep a pass for the next decision."""
        study, own = self.newest, self._own
        if study is None or not own.profile.learn(done):
            return
        news = self._news = self._news or News(own.profile, self.budgets)
        news.passes += 1
        news.signature = done.signature
        news.larger |= 0 < self._largest_bytes < done.input_bytes
        self._largest_bytes = max(self._largest_bytes, done.input_bytes)
        if study.plan is None:
            self._note_lean(own, done, counters)
            news.lean_seconds = own.lean_seconds
        else:
            news.measured.append(measured_of(done, counters))
            news.links = self._rates(counters, Links())

    def _decide(self, group: Agreement) -> None:
        news, self._news = self._news or News(self._own.profile, self.budgets), None
        decided = group.decide(news, self._lead)
        if decided is None:
            warn_user(
                f"ranks that share a model plan together, and {group.over}: what is done with "
                "activations stays as it is now. Apply the plan on all ranks, and begin the same "
                'steps on each; or plan for each rank, Session(plan_scope="rank"), where no '
                "collective runs inside of segments"
            )
            return
        study, self.budgets = decided
        self.studies[""] = self.newest = study
        if study.begun > self._own.begun:
            self._own = self._fresh(study.begun)

    def _lead(self, news: list[News]) -> tuple[Study, Budgets]:
        """What all do from now on, by what all have seen. Runs on one rank, on copies: what comes
        of it is in force where it was agreed on.
        """
        study, known = copy.deepcopy(self.newest), together(news)
        assert study is not None
        self.budgets = known.budgets
        if known.larger:
            return self._fresh(study.begun + 1), self.budgets
        study.profile = known.profile
        if study.plan is None and known.passes:
            study.lean_seconds = min(study.lean_seconds, known.lean_seconds)
            self._next_phase(study, known.signature)
            return study, self.budgets
        plan = study.plan
        for found in known.measured:
            if study.plan is plan:  # what follows was another plan's
                self._judge(study, found, known.signature, lambda: known.links)
        return study, self.budgets

    # -- measuring, then planning -----------------------------------------------------------------

    def _fresh(self, begun: int = 0) -> Study:
        return Study(ModelProfile(self._slow, self._least_bytes), begun=begun)

    def _note_lean(self, study: Study, done: Pass, counters: Counters) -> None:
        """A pass before there is a plan."""
        if done.all_recomputed:
            study.lean_seconds = min(study.lean_seconds, done.seconds(merged(done.waits)))
        study.profile.links = self._rates(counters, study.profile.links)

    def _next_phase(self, study: Study, signature: str) -> None:
        profile, phase = study.profile, study.phase + 1
        chain = self.chain_of(study, self.budgets)
        if phase == 1 and chain.device_bytes < chain.floor()[0]:
            # Nothing can work, unless less passes through a segment than all that it saves: look.
            hopeful = replace(study, profile=profile.hopeful())
            check_floor(self.chain_of(hopeful, self.budgets))
            study.phase = len(self._phases) - 2
            return
        while phase < len(self._phases) and not fits_under(
            profile, self.budgets, self._phases[phase][0]
        ):
            phase += 1
        if phase == len(self._phases):
            self.replan(study, signature)
        study.phase = phase  # once there is what comes then: planning may fail, or be interrupted

    def _rates(self, counters: Counters, known: Links) -> Links:
        """Of this step's transfers."""
        return measured_links(counters.lanes, known, self._given)

    def replan(self, study: Study, signature: str) -> None:
        """Make the plan from what is known now."""
        chain = self.chain_of(study, self.budgets)
        solution = solve(chain)
        study.plan = make_plan(study.profile, self.budgets, chain, solution, signature)
        study.plans += 1
        study.waited = 0

    def _judge(
        self, study: Study, found: Measured, signature: str, rates: Callable[[], Links]
    ) -> None:
        """A pass under the plan: is it as it was meant?"""
        plan = study.plan
        assert plan is not None
        study.measured.append(found)
        if found.step == study.judged:
            return  # its peak may be that of an earlier pass of this step, under something else
        over_bytes = found.peak_bytes - int(plan.budgets.device_bytes)
        room_bytes = int((1 - MARGIN) * plan.budgets.device_bytes - plan.floor_bytes)
        if over_bytes > 0:  # so that this plan does not fit again
            missed_bytes = min(found.peak_bytes - plan.peak_bytes, room_bytes)
            study.margin_bytes = max(study.margin_bytes + over_bytes, missed_bytes)
        study.judged = found.step
        if study.plans <= _ESTIMATING:
            self._replan(study, signature, over_bytes)
            return
        if study.plans > _ESTIMATING + _REPLANS:
            return
        if study.profile.in_flight > plan.in_flight:
            self._replan(study, signature, over_bytes)
            return
        if self._fall_back(study, signature):
            return
        predicted = sum(row.stall_seconds for row in plan.rows)
        late = found.evicted_bytes > 0
        late |= found.stall_seconds - predicted > _WAITING * plan.seconds
        study.waited = study.waited + 1 if late else 0
        if over_bytes <= 0 and study.waited < _PATIENCE:
            return
        if study.waited >= _PATIENCE:
            study.profile.links = rates()
            more_bytes = study.margin_bytes + found.evicted_bytes  # something needs its place
            study.margin_bytes = max(study.margin_bytes, min(more_bytes, room_bytes))
        self._replan(study, signature, over_bytes)

    def _replan(self, study: Study, signature: str, over_bytes: int) -> None:
        """Again, if that is possible; else the plan stays."""
        try:
            self.replan(study, signature)
        except PlanError as e:
            if over_bytes > 0:
                warn_user(
                    f"the budget of {format_bytes(self.budgets.device_bytes)} was passed by "
                    f"{format_bytes(over_bytes)}, and no plan needs less: {e}"
                )
            study.plans = _ESTIMATING + _REPLANS + 1

    def _fall_back(self, study: Study, signature: str) -> bool:
        """Recompute everything, where that was measured to be faster than the plan is."""
        plan, newest = study.plan, study.measured[-_PATIENCE:]
        assert plan is not None
        if len(newest) < _PATIENCE or study.fell_back or not plan.offloaded_bytes:
            return False  # what moves nothing is slower for other reasons
        seconds = statistics.median(m.seconds for m in newest)
        if seconds <= _SLOWER * study.lean_seconds:
            return False
        chain = study.profile.chain(self.budgets)
        for action in ("recompute", f"recompute+{self._slow}"):
            choice = uniform_choice(chain, action)
            predicted = predict(chain, choice).seconds
            if math.isfinite(predicted):
                solution = Solution(choice, predicted, plan.bound_seconds, plan.gap, "fallback")
                made = make_plan(study.profile, self.budgets, chain, solution, signature)
                note = (
                    f"the plan took {format_seconds(seconds)} a step, everything recomputed "
                    f"{format_seconds(study.lean_seconds)}: recomputing instead"
                )
                study.plan, study.fell_back = replace(made, notes=(*made.notes, note)), True
                return True
        return False

    def chain_of(self, study: Study, budgets: Budgets) -> Chain:
        """The problem for other budgets than its own."""
        return study.profile.chain_with_margin(budgets, study.margin_bytes)
