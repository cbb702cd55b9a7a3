"""Verdict: what paired step times allow to say about the cost of offloading, and what they do not.

Each round runs one step without offloading and one with it, so a pair shares whatever else the
machine was doing. The interval is that of the sign test: between the k-th smallest and the k-th
largest ratio lies the median with a confidence that holds for any distribution (W. J. Conover,
Practical Nonparametric Statistics, 3rd edition, section 3.2). Where it holds 1, or no interval has
the confidence asked for, nothing is claimed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

CONFIDENCE = 0.95
LEAST_PAIRS = 6  # of fewer, even the whole range has less confidence


@dataclass(frozen=True)
class Verdict:
    """How long a step takes with offloading, in times of one without.

    Attributes:
        ratio: median over the pairs.
        low: of the interval; equal to the smallest ratio where there are too few pairs.
        high: likewise.
        confidence: that the median lies between them.
        pairs: how many were measured.
    """

    ratio: float
    low: float
    high: float
    confidence: float
    pairs: int

    @classmethod
    def of(cls, plain: Sequence[float], offloaded: Sequence[float]) -> Verdict:
        """The verdict over pairs of step times.

        Example:
            >>> Verdict.of([1.0] * 6, [1.1, 1.2, 1.1, 1.3, 1.2, 1.2]).is_claimed
            True
            >>> Verdict.of([1.0] * 6, [1.1, 0.9, 1.1, 1.3, 0.8, 1.2]).is_claimed
            False
        """
        ratios = sorted(b / a for a, b in zip(plain, offloaded, strict=True))
        cut = _most_to_leave_out(len(ratios))
        confidence = _confidence(len(ratios), cut)
        low, high = ratios[cut], ratios[-1 - cut]
        return cls(statistics.median(ratios), low, high, confidence, len(ratios))

    @property
    def is_claimed(self) -> bool:
        """Whether a difference was shown."""
        return self.confidence >= CONFIDENCE and not self.low <= 1 <= self.high

    def __str__(self) -> str:
        interval = f"[{self.low:.3f}, {self.high:.3f}]"
        if self.confidence < CONFIDENCE:
            return (
                f"No claim: {self.pairs} pairs of steps are too few to tell ({self.ratio:.3f} of "
                f"plain's time, range {interval}); measure {LEAST_PAIRS} or more"
            )
        if not self.is_claimed:
            return (
                f"No claim: a step takes {self.ratio:.3f} times plain's time, but the "
                f"{self.confidence:.1%} interval {interval} holds 1: the difference is within noise"
            )
        percent, word = abs(self.ratio - 1), "longer" if self.ratio > 1 else "shorter"
        return (
            f"A step takes {percent:.1%} {word} with offloading: {self.ratio:.3f} times plain's, "
            f"{self.confidence:.1%} interval {interval}, {self.pairs} pairs"
        )


def _confidence(count: int, cut: int) -> float:
    """That the median lies between what is left when ``cut`` are left out at both ends."""
    return 1 - 2 * sum(comb(count, i) for i in range(cut + 1)) / 2**count if count else 0.0


def _most_to_leave_out(count: int) -> int:
    cut = 0
    while _confidence(count, cut + 1) >= CONFIDENCE and 2 * (cut + 1) < count:
        cut += 1
    return cut
