"""The search: settings are predicted by the replay, and only the most promising are tried.

Each trial corrects the model: by what the bytes that moved cost beyond the prediction, and by what
is alive beyond it. The next trial is then the best of what is left. It ends when no setting that
was not tried is predicted to be better than the best that was, or at a limit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.tuner.replay import ReplayedStep
from offload.tuner.setting import Setting
from offload.tuner.trial import TimedSteps

__all__ = ["Calibration", "Candidate", "Limits", "Trial", "calibrated", "search"]

DEFAULT_OVERHEAD = 0.05
_SAME_TIME = 0.01  # of a step: shorter differences are noise
_SAME_BYTES = 0.02
_LIVE_MARGIN = 0.02  # what is predicted so close below a limit may turn out above


@dataclass(frozen=True)
class Limits:
    """What a setting has to keep to, and thereby what is sought.

    Attributes:
        max_live_bytes: most bytes alive; with it, the fastest setting that keeps to it is sought.
        max_overhead: most time over plain's, as a share; without ``max_live_bytes``, the setting
            with the fewest bytes alive that keeps to it is sought.
    """

    max_live_bytes: int | None = None
    max_overhead: float | None = None

    @classmethod
    def given(cls, max_live_bytes: int | None, max_overhead: float | None) -> Limits:
        """With the default where neither is given."""
        if max_live_bytes is None and max_overhead is None:
            max_overhead = DEFAULT_OVERHEAD
        return cls(max_live_bytes, max_overhead)

    def kept(self, ratio: float, live_bytes: float) -> bool:
        """Whether a step of ``ratio`` of plain's time with so many bytes alive keeps to them."""
        live = self.max_live_bytes is None or live_bytes <= self.max_live_bytes
        return live and (self.max_overhead is None or ratio <= 1 + self.max_overhead)

    def score(self, ratio: float, live_bytes: float, moved_bytes: float) -> tuple[float, ...]:
        """Lower is better; of settings that differ by no more than noise, what moves less."""
        broken = not self.kept(ratio, live_bytes)
        if self.max_live_bytes is None:
            return (broken, ratio if broken else live_bytes, ratio)
        if live_bytes > self.max_live_bytes:
            return (broken, live_bytes, ratio)
        return (broken, round(ratio / _SAME_TIME), moved_bytes, live_bytes)


@dataclass(frozen=True)
class Candidate:
    """A setting and what the replay says of it."""

    setting: Setting
    predicted: ReplayedStep


@dataclass(frozen=True)
class Trial:
    """A setting that was tried: what was predicted then, and what was measured."""

    setting: Setting
    predicted_ratio: float
    predicted_live_bytes: int
    moved_bytes: int
    measured: TimedSteps

    def score(self, limits: Limits) -> tuple[float, ...]:
        """Lower is better."""
        m = self.measured
        return limits.score(m.ratio, m.peak_live_bytes, self.moved_bytes)


@dataclass(frozen=True)
class Calibration:
    """What measured steps add to predictions.

    Attributes:
        plain_seconds: a plain step.
        seconds_per_byte: what a byte that moves costs beyond the replay.
        live_bytes: what is alive beyond the replay.
    """

    plain_seconds: float
    seconds_per_byte: float = 0.0
    live_bytes: int = 0

    def ratio(self, predicted: ReplayedStep) -> float:
        """Of the step's time to plain's."""
        extra = self.seconds_per_byte * predicted.moved_bytes
        return (predicted.seconds + extra) / self.plain_seconds

    def live(self, predicted: ReplayedStep) -> int:
        """Bytes alive."""
        return max(0, predicted.peak_live_bytes + self.live_bytes)

    def score(self, candidate: Candidate, limits: Limits) -> tuple[float, ...]:
        """Lower is better."""
        p = candidate.predicted
        margin = 1 + _LIVE_MARGIN if limits.max_live_bytes is not None else 1
        return limits.score(self.ratio(p), self.live(p) * margin, p.moved_bytes)


def calibrated(base: Calibration, tried: Sequence[tuple[ReplayedStep, TimedSteps]]) -> Calibration:
    """The calibration that fits what was tried: time by least squares through the origin, never
    below the replay's; bytes alive by the largest difference.

    Example:
        >>> p = ReplayedStep(1.0, 0, 0, 100, 50, 1)
        >>> calibrated(Calibration(1.0), [(p, TimedSteps([1.5], [1.0], 130))])
        Calibration(plain_seconds=1.0, seconds_per_byte=0.01, live_bytes=30)
    """
    if not tried:
        return base
    lacking = [
        (m.ratio * base.plain_seconds - p.seconds, p.moved_bytes) for p, m in tried if p.moved_bytes
    ]
    weight = sum(nbytes**2 for _, nbytes in lacking)
    slope = sum(seconds * nbytes for seconds, nbytes in lacking) / weight if weight else 0.0
    live_bytes = max(m.peak_live_bytes - p.peak_live_bytes for p, m in tried)
    return Calibration(base.plain_seconds, max(0.0, slope), live_bytes)


def search(
    candidates: Sequence[Candidate],
    limits: Limits,
    base: Calibration,
    measure: Callable[[Setting], TimedSteps],
    *,
    max_trials: int,
    budget_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Trial]:
    """Try the most promising candidates, the best first as far as is known by then.

    Args:
        candidates: settings with their predictions.
        limits: what is sought.
        base: before anything was tried.
        measure: runs a trial.
        max_trials: at most so many.
        budget_seconds: no trial begins after so much time.
        clock: in seconds.
    """
    started = clock()
    trials: list[Trial] = []
    tried: list[tuple[ReplayedStep, TimedSteps]] = []
    left = list(candidates)
    while left and len(trials) < max_trials and clock() - started < budget_seconds:
        now = calibrated(base, tried)
        best = min(left, key=lambda c: now.score(c, limits))
        if trials and not _promising(best, now, limits, trials):
            break
        p = best.predicted
        measured = measure(best.setting)
        trials.append(Trial(best.setting, now.ratio(p), now.live(p), p.moved_bytes, measured))
        tried.append((p, measured))
        left = [c for c in left if not _alike(c.predicted, p)]
    return trials


def _promising(
    candidate: Candidate, now: Calibration, limits: Limits, trials: Sequence[Trial]
) -> bool:
    """Whether it could be better than the best so far, by more than noise."""
    best = min(trials, key=lambda t: t.score(limits)).measured
    ratio, live_bytes = now.ratio(candidate.predicted), now.live(candidate.predicted)
    if not limits.kept(best.ratio, best.peak_live_bytes):
        return True  # nothing found yet
    if not limits.kept(ratio, live_bytes):
        return False
    if limits.max_live_bytes is None:
        return live_bytes < best.peak_live_bytes * (1 - _SAME_BYTES)
    return ratio < best.ratio - _SAME_TIME


def _alike(a: ReplayedStep, b: ReplayedStep) -> bool:
    """Whether the replay sees no difference that a measurement would."""
    return (
        abs(a.seconds - b.seconds) <= _SAME_TIME / 5 * b.seconds
        and abs(a.peak_live_bytes - b.peak_live_bytes) <= _SAME_BYTES / 2 * b.peak_live_bytes
        and abs(a.moved_bytes - b.moved_bytes) <= _SAME_BYTES / 2 * max(b.moved_bytes, 1)
    )
