"""Plan: what becomes of the activations of each segment, and what that is predicted to cost."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from offload.errors import PlanError
from offload.planner.model import Chain, Links
from offload.planner.needs import laid_out, need_of, uniform_choice
from offload.planner.predict import Walk, caps, predict
from offload.planner.profile import Budgets, ModelProfile
from offload.planner.solve import Solution
from offload.report.tables import FigureTable, text_of
from offload.tiers.gate import Need
from offload.units import SECONDS_PER_DAY, format_bytes, format_seconds

__all__ = ["Plan", "PlanRow", "make_plan"]

JSON_FORMAT = 3


@dataclass(frozen=True)
class PlanRow:
    """One segment, or what lies between two. Bytes and seconds.

    Attributes:
        name: of the module, or a description.
        action: ``"keep"``, ``"disk"``, ``"disk:50%"`` (the first half of what it saves),
            ``"recompute+disk"`` and so on.
        saved_bytes: of the storages it saves.
        resident_bytes: stay on the device until its backward.
        offload_bytes: leave and come back.
        forward_seconds: of its forward, stalls apart.
        backward_seconds: of its backward with what is recomputed.
        stall_seconds: waited for room or for bytes.
        need: what the budget's gate is told of it.
        is_gap: whether it is no segment, but what lies between two.
        limit_bytes: of what leaves in part, by which the hooks tell what does.
    """

    name: str
    action: str
    saved_bytes: int
    resident_bytes: int
    offload_bytes: int
    forward_seconds: float
    backward_seconds: float
    stall_seconds: float
    need: Need
    is_gap: bool = False
    limit_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What a step does with the activations of each segment. Immutable; ``print`` shows a table.

    Made by ``offload.plan``, put in force by ``Session.apply(model, plan)``.

    Attributes:
        signature: shapes and types of the inputs it was made for.
        device: the kind of device.
        budgets: device, host and disk bytes, and the windows of the transfers.
        rows: the segments and what lies between them, in the order of the forward.
        seconds: predicted, of a forward and backward.
        plain_seconds: predicted without any budget, everything kept.
        recompute_seconds: predicted with every segment recomputed; ``None`` where that does not
            fit.
        bound_seconds: no plan within the budgets takes less, by the model.
        gap: by what part of its time the plan may be slower than the best.
        peak_bytes: predicted, of the memory that the device budget counts.
        plain_peak_bytes: the same with everything kept.
        base_bytes: of ``peak_bytes``, what is there in any case.
        floor_bytes: the least device budget with which any plan runs.
        floor_segment: what sets it.
        offloaded_bytes: leave the device in a step, and come back.
        written_bytes: to the disk in a step.
        links: the rates it was made for.
        solver: what found it.
        notes: what should be known of it.
        in_flight: forwards that may wait for their backward at one time, as in a pipeline; the
            bytes are those of all of them, the seconds of one.
        before_bytes: of ``peak_bytes``, what may be there of others when a forward begins.

    Example:
        >>> import offload, torch
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(),
        ...                                     torch.nn.Linear(256, 64))
        >>> model = torch.nn.Sequential(*(block() for _ in range(4)))
        >>> x = torch.randn(256, 64)
        >>> plan = offload.plan(model, lambda: model(x).square().mean().backward(),
        ...                     device_budget="1MiB", min_offload_bytes=0)
        >>> plan.peak_bytes <= 2**20, len(plan.actions)
        (True, 4)
        >>> offload.Plan.from_json(plan.to_json()) == plan
        True
    """

    signature: str
    device: str
    budgets: Budgets
    rows: tuple[PlanRow, ...]
    seconds: float
    plain_seconds: float
    recompute_seconds: float | None
    bound_seconds: float
    gap: float
    peak_bytes: int
    plain_peak_bytes: int
    base_bytes: int
    floor_bytes: int
    floor_segment: str
    offloaded_bytes: int
    written_bytes: int
    links: Links
    solver: str
    notes: tuple[str, ...] = ()
    in_flight: int = 1
    before_bytes: int = 0

    @property
    def actions(self) -> dict[str, str]:
        """By segment, what becomes of its activations."""
        return {row.name: row.action for row in self.rows if not row.is_gap}

    @property
    def gap_actions(self) -> dict[int, str]:
        """What becomes of what is saved outside of segments, by the number of those before it."""
        found, before = {}, 0
        for row in self.rows:
            if row.is_gap:
                found[before] = row.action
            else:
                before += 1
        return found

    @property
    def limits(self) -> dict[str, int]:
        """By segment, the bytes of those that leave in part."""
        return {row.name: row.limit_bytes for row in self.rows if ":" in row.action}

    @property
    def needs(self) -> tuple[Need, ...]:
        """For the gate: entry ``2 i + 1`` is segment ``i``, those around it what lies between."""
        return laid_out([(not row.is_gap, row.need) for row in self.rows])

    @property
    def overhead(self) -> float:
        """Predicted seconds over those with everything kept, less 1."""
        return self.seconds / self.plain_seconds - 1 if self.plain_seconds else 0.0

    def rules(self) -> dict[str, str]:
        """The actions as rules for ``Session.apply``, by module name.

        Rules know no parts and no budget: ``Session.apply(model, plan)`` does. What leaves in part
        goes whole.
        """
        return {n: a.partition(":")[0] for n, a in self.actions.items() if "#" not in n}

    def diff(self, other: Plan) -> dict[str, tuple[str, str]]:
        """Where the plans differ: by segment, the action here and there (``""``: none).

        A plan differs from itself in nothing: ``plan.diff(plan) == {}``.
        """
        mine, theirs = self.actions, other.actions
        names = [*mine, *(n for n in theirs if n not in mine)]
        both = {n: (mine.get(n, ""), theirs.get(n, "")) for n in names}
        return {n: pair for n, pair in both.items() if pair[0] != pair[1]}

    # -- JSON -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every field, plus the number of the format. What has no limit is ``None``."""
        made: dict[str, Any] = {"format": JSON_FORMAT, **asdict(self)}
        made["budgets"] = {k: None if math.isinf(v) else int(v) for k, v in made["budgets"].items()}
        made["rows"] = [{**row, "need": list(row["need"])} for row in made["rows"]]
        return {**made, "notes": list(self.notes)}

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The plan that ``to_json`` wrote.

        Raises:
            PlanError: the text is no plan, or of another format.
        """
        try:
            made = json.loads(text)
            if made["format"] != JSON_FORMAT:
                raise PlanError(f"a plan of format {made['format']}; this reads {JSON_FORMAT}")
            values = {f.name: made[f.name] for f in fields(cls)}
            limits = {k: math.inf if v is None else v for k, v in values["budgets"].items()}
            values["budgets"] = Budgets(**limits)
            values["rows"] = tuple(
                PlanRow(**{**row, "need": _need(*row["need"])}) for row in values["rows"]
            )
            values["links"] = Links(**values["links"])
            values["notes"] = tuple(values["notes"])
            return cls(**values)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as e:
            raise PlanError(f"the text is no plan: {type(e).__name__}: {e}") from e

    # -- for people -------------------------------------------------------------------------------

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> FigureTable:
        """The plan for people, as a ``rich`` table."""
        budget = format_bytes(self.budgets.device_bytes)
        table = FigureTable(
            title=f"plan for {budget} on {self.device}, inputs {self.signature or 'unknown'}",
            caption=self.summary(),
            caption_justify="left",
        )
        table.add_column("segment", style="bold")
        table.add_column("action")
        table.add_figures("saves", "stays", "leaves", "forward", "backward", "waits")
        for row in self.rows:
            sizes = (row.saved_bytes, row.resident_bytes, row.offload_bytes)
            times = (row.forward_seconds, row.backward_seconds, row.stall_seconds)
            table.add_row(
                row.name,
                "(stays)" if row.is_gap and row.action == "keep" else row.action,
                *(format_bytes(n) if n else "" for n in sizes),
                *(format_seconds(t) if t else "" for t in times),
                style="dim" if row.is_gap else None,
            )
        return table

    def summary(self) -> str:
        """Time and memory in a few lines."""
        size, span = format_bytes, format_seconds
        again = span(self.recompute_seconds) if self.recompute_seconds else "does not fit"
        lines = [
            f"predicted: {span(self.seconds)} a step ({self.overhead:+.1%}), peak "
            f"{size(self.peak_bytes)}; everything kept: {span(self.plain_seconds)}, "
            f"{size(self.plain_peak_bytes)}; everything recomputed: {again}",
            f"cannot be better than {span(self.bound_seconds)}; at least "
            f"{size(self.floor_bytes)} are needed, for {self.floor_segment}",
            f"leaves and comes back: {size(self.offloaded_bytes)}, of that to the disk "
            f"{size(self.written_bytes)}" + self._endurance(),
        ]
        return "\n".join([*lines, *self.notes])

    def _endurance(self) -> str:
        if not self.written_bytes or not self.seconds:
            return ""
        daily = self.written_bytes / self.seconds * SECONDS_PER_DAY / 1e12
        return f" ({daily:.1f} TB a day of training without a break)"


def _need(*values: Any) -> Need:
    """As JSON gives it."""
    need = Need(*values)
    return need._replace(saves=tuple(need.saves))


def make_plan(
    profile: ModelProfile, budgets: Budgets, chain: Chain, solution: Solution, signature: str
) -> Plan:
    """The plan of a solved chain."""
    found = predict(chain, solution.choice)
    walk = Walk(chain, solution.choice)
    rooms = caps(walk)
    rows = []
    for i, (segment, option) in enumerate(zip(chain.segments, walk.options, strict=True)):
        rows.append(
            PlanRow(
                name=segment.name,
                action=option.action,
                saved_bytes=int(segment.saved_bytes),
                resident_bytes=int(option.resident_bytes),
                offload_bytes=int(option.offload_bytes),
                forward_seconds=segment.forward_seconds + option.forward_seconds,
                backward_seconds=segment.backward_seconds + option.backward_seconds,
                stall_seconds=found.forward_stalls[i] + found.backward_stalls[i],
                need=need_of(walk, i, rooms[i]),
                is_gap=segment.is_gap,
                limit_bytes=int(option.limit_bytes),
            )
        )
    again = _recompute_seconds(chain)
    keep = [0] * len(chain.segments)
    plain = predict(_unlimited(chain), keep)
    floor, floor_segment = chain.floor()
    made = Plan(
        signature=signature,
        device="cpu" if profile.slow == "disk" else "accelerator",
        budgets=budgets,
        rows=tuple(rows),
        seconds=found.seconds,
        plain_seconds=plain.seconds,
        recompute_seconds=again,
        bound_seconds=solution.bound_seconds,
        gap=solution.gap,
        peak_bytes=int(found.peak_device_bytes) + profile.base_bytes,
        plain_peak_bytes=int(plain.peak_device_bytes) + profile.base_bytes,
        base_bytes=profile.base_bytes,
        floor_bytes=math.ceil(floor) + profile.base_bytes,
        floor_segment=floor_segment,
        offloaded_bytes=int(found.offloaded_bytes),
        written_bytes=int(found.disk_bytes),
        links=profile.links,
        solver=solution.solver,
        in_flight=chain.in_flight,
        before_bytes=int(profile.leftover_bytes + walk.resident[0]),
    )
    return _with_notes(made)


def _recompute_seconds(chain: Chain) -> float | None:
    """Of plain checkpointing: every segment recomputed, its inputs kept."""
    seconds = predict(chain, uniform_choice(chain, "recompute")).seconds
    return seconds if math.isfinite(seconds) else None


def _unlimited(chain: Chain) -> Chain:
    return Chain(chain.segments, math.inf, in_flight=chain.in_flight)


def _with_notes(plan: Plan) -> Plan:
    notes = []
    if plan.in_flight > 1:
        notes.append(
            f"{plan.in_flight} forwards wait for their backward at one time: the bytes are those "
            "of all, the times of one forward and backward"
        )
    if plan.plain_peak_bytes <= plan.budgets.device_bytes:
        notes.append("everything fits: nothing leaves, nothing is recomputed")
    if plan.floor_bytes >= 0.98 * plan.plain_peak_bytes:
        notes.append(
            f"offloading cannot lower this model's peak: {plan.floor_segment} needs as much by "
            "itself. Divide it into smaller segments, or lower the batch"
        )
    return replace(plan, notes=tuple(notes))
