"""Joint: what the ranks that share a model have measured, put together for one plan.

[Note: ranks act alike] Recomputing a part of a model runs its collectives again. So the ranks of a
group all have to recompute the same, or one waits for a gradient while another gathers parameters.
What a forward does may therefore depend on nothing that only its rank knows: not on its times, and
not on the shape of its inputs, which may be another one on each. There is one study for all shapes,
planned from the slowest times and the largest bytes, and it only changes between steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields
from typing import Any

from offload.errors import PlanError
from offload.planner.model import Links
from offload.planner.profile import Budgets, ModelProfile
from offload.planner.record import Measured

__all__ = ["News", "together"]


@dataclass
class News:
    """What a rank has seen since the last decision.

    Attributes:
        profile: all that it knows.
        budgets: its own.
        signature: of its newest inputs.
        lean_seconds: the least that a pass took with everything recomputed.
        passes: how many it has learned from.
        measured: those under a plan.
        links: the rates of the newest transfers.
        larger: whether inputs were larger than any before.
    """

    profile: ModelProfile
    budgets: Budgets
    signature: str = ""
    lean_seconds: float = float("inf")
    passes: int = 0
    measured: list[Measured] = field(default_factory=list)
    links: Links = field(default_factory=Links)
    larger: bool = False


def together(news: Sequence[News]) -> News:
    """The news of a rank that stands for all: the slowest times, the largest bytes, the least
    budgets.

    Raises:
        PlanError: the ranks ran other segments.
    """
    counts = min(len(n.measured) for n in news)
    newest = [n.measured[len(n.measured) - counts :] for n in news]
    return News(
        profile=_profile([n.profile for n in news]),
        budgets=Budgets(*(min(v) for v in _columns([n.budgets for n in news]))),
        signature=max(news, key=lambda n: _saved_bytes(n.profile)).signature,
        lean_seconds=max(n.lean_seconds for n in news),
        passes=min(n.passes for n in news),
        measured=[_worst(of) for of in zip(*newest, strict=True)],
        links=_slowest([n.links for n in news]),
        larger=any(n.larger for n in news),
    )


def _columns(values: Sequence[Any]) -> list[list[Any]]:
    """By field of a dataclass, its values."""
    return [[getattr(v, f.name) for v in values] for f in fields(values[0])]


def _worst(measured: Sequence[Measured]) -> Measured:
    names = [f.name for f in fields(Measured)]
    return Measured(**dict(zip(names, map(max, _columns(measured)), strict=True)))


def _slowest(links: Sequence[Links]) -> Links:
    known = [[rate for rate in column if rate] for column in _columns(links)]
    return Links(*(min(rates, default=None) for rates in known))


def _profile(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Of the rank that saves most, as the storages of one pass belong together; with times of all.

    A rank that has not run a pass yet has nothing to say.
    """
    begun = [p for p in profiles if p.segments]
    if not begun:
        return deepcopy(profiles[0])
    made = deepcopy(max(begun, key=_saved_bytes))
    for other in begun:
        if other.keys != made.keys:
            differing = sorted(set(other.keys) ^ set(made.keys)) or other.keys
            raise PlanError(
                f"ranks that share a model ran other segments of it ({', '.join(differing[:4])}), "
                'so one plan cannot serve all of them: plan for each rank, plan_scope="rank", '
                "where no collective runs inside of segments"
            )
        for own, its in zip(made.segments, other.segments, strict=True):
            own.before_seconds = max(own.before_seconds, its.before_seconds)
            for action, seconds in its.seconds.items():
                known = own.seconds.get(action, seconds)
                own.seconds[action] = (
                    max(known[0], seconds[0]), max(known[1], seconds[1]), max(known[2], seconds[2]),
                )  # fmt: skip
            for name in ("forward_peak_bytes", "backward_peak_bytes"):
                setattr(own, name, max(getattr(own, name), getattr(its, name)))
            seen = (own.passing_bytes, its.passing_bytes)
            own.passing_bytes = None if None in seen else max(n or 0 for n in seen)
    for name in ("base_bytes", "leftover_bytes", "leftover_back_bytes"):
        setattr(made, name, max(getattr(p, name) for p in begun))
    made.turn_seconds = max(p.turn_seconds for p in begun)
    made.in_flight = max(p.in_flight for p in begun)
    made.links = _slowest([p.links for p in begun])
    return made


def _saved_bytes(profile: ModelProfile) -> int:
    return sum(sum(s.saved.values()) for s in profile.segments)
