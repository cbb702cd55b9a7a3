"""The decision: offload with which setting, or recompute, or leave all as it is; and the curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from offload.tuner.search import Calibration, Candidate, Limits, Trial
from offload.tuner.trial import TimedSteps
from offload.units import format_bytes

__all__ = ["Choice", "Decision", "decide", "pareto"]

_WORTH_SHARE = 0.9  # of plain's bytes alive: what saves less is not worth a session
_TIE = 0.01  # of plain's time


class Choice(Enum):
    """What to do."""

    OFFLOAD = "offload"
    PLAIN = "plain"
    CHECKPOINT = "checkpoint"
    NOTHING = "nothing"  # no way that was tried keeps to the limits


@dataclass(frozen=True)
class Decision:
    """What to do and why; ``trial`` is the one chosen, or None if it is not to offload."""

    choice: Choice
    why: str
    trial: Trial | None = None


def decide(
    plain: TimedSteps, recomputed: TimedSteps | None, trials: Sequence[Trial], limits: Limits
) -> Decision:
    """Compare what was measured under the limits.

    Args:
        plain: plain steps.
        recomputed: steps with torch's checkpoint, if the model has repeated blocks.
        trials: what the search tried.
        limits: what to keep to.
    """
    if limits.max_live_bytes is not None and plain.peak_live_bytes <= limits.max_live_bytes:
        return Decision(
            Choice.PLAIN,
            f"plain training holds {format_bytes(plain.peak_live_bytes)} of activations, within "
            f"the {format_bytes(limits.max_live_bytes)} allowed: there is nothing to gain",
        )
    best = min(trials, key=lambda t: t.score(limits), default=None)
    ours = best.measured if best is not None and _kept(best.measured, limits) else None
    theirs = recomputed if recomputed is not None and _kept(recomputed, limits) else None
    if theirs is not None and (ours is None or _better(theirs, ours, limits)):
        return Decision(Choice.CHECKPOINT, _compared("recomputing", theirs, "offloading", ours))
    if ours is None:
        return Decision(Choice.NOTHING, _nothing(recomputed, trials, limits))
    if ours.peak_live_bytes > _WORTH_SHARE * plain.peak_live_bytes:
        return Decision(
            Choice.PLAIN,
            f"offloading within the limits leaves {format_bytes(ours.peak_live_bytes)} of "
            f"{format_bytes(plain.peak_live_bytes)} alive: not worth a session",
        )
    return Decision(Choice.OFFLOAD, _compared("offloading", ours, "recomputing", recomputed), best)


def _kept(measured: TimedSteps, limits: Limits) -> bool:
    return limits.kept(measured.ratio, measured.peak_live_bytes)


def _better(a: TimedSteps, b: TimedSteps, limits: Limits) -> bool:
    """Whether recomputation ``a`` beats ``b``; in a tie of times, by the bytes alive."""
    if limits.max_live_bytes is not None:
        if abs(a.ratio - b.ratio) > _TIE:
            return a.ratio < b.ratio
        return a.peak_live_bytes < b.peak_live_bytes
    return a.peak_live_bytes < b.peak_live_bytes


def _compared(name: str, chosen: TimedSteps, other_name: str, other: TimedSteps | None) -> str:
    text = f"{name} takes {_figures(chosen)}"
    return text if other is None else f"{text}; {other_name} {_figures(other)}"


def _figures(m: TimedSteps) -> str:
    return f"{m.ratio:.2f} of plain's time and {format_bytes(m.peak_live_bytes)}"


def _nothing(recomputed: TimedSteps | None, trials: Sequence[Trial], limits: Limits) -> str:
    tried = [t.measured for t in trials] + ([recomputed] if recomputed is not None else [])
    if not tried:
        return "nothing could be tried"
    if limits.max_live_bytes is not None:
        least = min(tried, key=lambda m: m.peak_live_bytes)
        within = least.peak_live_bytes <= limits.max_live_bytes
        allowed = f"the {format_bytes(limits.max_live_bytes)} allowed"
        if not within:
            return f"nothing keeps to {allowed}; the least alive was {_figures(least)}"
        fitting = [m for m in tried if m.peak_live_bytes <= limits.max_live_bytes]
        fastest = min(fitting, key=lambda m: m.ratio)
        return f"what keeps to {allowed} is too slow: the fastest takes {_figures(fastest)}"
    fastest = min(tried, key=lambda m: m.ratio)
    return (
        f"nothing stays within {1 + (limits.max_overhead or 0):.2f} of plain's time; the fastest "
        f"takes {_figures(fastest)}"
    )


def pareto(
    candidates: Sequence[Candidate], calibration: Calibration, *, points: int = 8
) -> list[tuple[Candidate, float, int]]:
    """The trade-off as predicted: candidates with ratio and bytes alive, of which none is beaten in
    both by another; the fewest bytes first, thinned to about ``points``.
    """
    known = [(c, calibration.ratio(c.predicted), calibration.live(c.predicted)) for c in candidates]
    known.sort(key=lambda e: (e[2], e[1], e[0].predicted.moved_bytes))
    front: list[tuple[Candidate, float, int]] = []
    for entry in known:
        if not front or entry[1] < front[-1][1] - 1e-4:
            front.append(entry)
    if len(front) <= points:
        return front
    return [front[round(i * (len(front) - 1) / (points - 1))] for i in range(points)]
