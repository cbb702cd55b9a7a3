"""Schedules for a chain of functions: which parts are checkpointed, what it costs, what it holds.

A chain of ``n`` functions is cut into segments. Every segment but the last gives its activations up
and keeps its input only; the last runs as it is, as backward begins with it. With more levels each
segment is cut again in the same way, and so on: a checkpoint within a checkpoint. Pure arithmetic.

Two measures, for functions that cost and hold the same:

*evaluations*: how often any function is called by one forward and backward. Cut evenly ``L`` times
into ``k`` segments, each level calls ``n (k - 1) / k`` functions once more::

    n (1 + L (k - 1) / k)  <=  (L + 1) n

*live*: the most inputs of functions that are alive at one time. Each level keeps up to ``k - 1``
inputs of segments, and the innermost segment those of all its functions::

    L (k - 1) + n / k^L

For one level and ``k = sqrt(n)`` these are the ``2 n`` and ``2 sqrt(n)`` of Chen et al., section 3;
for ``k = 2`` and ``L = log2(n)`` the ``O(n log n)`` and ``O(log n)`` of their section 4.3. With as
many live inputs no schedule takes fewer evaluations than the binomial one of Griewank and Walther,
which the tests compare with.

    Tianqi Chen, Bing Xu, Chiyuan Zhang, Carlos Guestrin: Training Deep Nets with Sublinear Memory
    Cost. 2016. https://arxiv.org/abs/1604.06174

    Andreas Griewank, Andrea Walther: Algorithm 799: revolve: an implementation of checkpointing for
    the reverse or adjoint mode of computational differentiation. ACM Transactions on Mathematical
    Software 26(1), 2000. https://doi.org/10.1145/347837.347846
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

__all__ = ["Schedule", "split"]

_FEWEST_WORTH_IT = 4  # two segments of one function each would save nothing


def split(functions: range, segments: int) -> list[range]:
    """``functions`` in at most ``segments`` ranges of nearly equal length, none empty.

    The longer ones come last: the last is not evaluated again, so it should be a long one.

    Example:
        >>> split(range(11), 4)
        [range(0, 2), range(2, 5), range(5, 8), range(8, 11)]
        >>> split(range(5, 7), 4)
        [range(5, 6), range(6, 7)]
    """
    n = len(functions)
    segments = min(segments, n)
    cuts = [n * i // segments for i in range(segments + 1)]
    return [functions[a:b] for a, b in itertools.pairwise(cuts)]


@dataclass(frozen=True)
class Schedule:
    """A chain of ``functions`` functions, cut ``levels`` times into ``segments`` segments.

    Example:
        >>> Schedule.of(100, "sqrt")
        Schedule(functions=100, segments=10, levels=1)
        >>> Schedule.of(100, "sqrt").evaluations(), Schedule.of(100, "sqrt").live()
        (190, 19)
        >>> deep = Schedule.of(100, segments=2, levels=7)
        >>> deep.evaluations(), deep.live()
        (416, 8)
    """

    functions: int
    segments: int  # of each level
    levels: int

    @classmethod
    def of(cls, functions: int, segments: int | str, levels: int = 1) -> Schedule:
        """A schedule with the number of segments worked out.

        Args:
            functions: length of the chain, at least 1.
            segments: a number, or ``"sqrt"``: the smallest ``k`` with ``k ** (levels + 1)`` not
                below ``functions``, which for one level is the square root of Chen et al.; or
                ``"auto"``: the same, but a single segment for fewer than 4 functions.
            levels: how often to cut, at least 1.

        Raises:
            TypeError: ``segments`` or ``levels`` is of another type.
            ValueError: a number below 1, or another word.
        """
        levels = _checked("levels", levels)
        if functions < 1:
            raise ValueError("there is nothing to run: give at least one function")
        if segments == "sqrt":
            segments = _root(functions, levels + 1)
        elif segments == "auto":
            segments = 1 if functions < _FEWEST_WORTH_IT else _root(functions, levels + 1)
        elif isinstance(segments, str):
            raise ValueError(f'segments is "sqrt", "auto" or a number, not {segments!r}')
        return cls(functions, _checked("segments", segments), levels)

    def evaluations(self) -> int:
        """Calls of functions in one forward and backward; ``functions`` of them are the forward."""
        return self.functions + _repeated(self.functions, self.segments, self.levels)

    def live(self) -> int:
        """Most inputs of functions alive at one time, if each saves its input and nothing else."""
        return _live(self.functions, self.segments, self.levels)


def _repeated(functions: int, segments: int, levels: int) -> int:
    if levels == 0 or functions <= 1 or segments == 1:
        return 0
    parts = [len(part) for part in split(range(functions), segments)]
    within = sum(_repeated(part, segments, levels - 1) for part in parts)
    return sum(parts[:-1]) + within


def _live(functions: int, segments: int, levels: int) -> int:
    if levels == 0 or functions <= 1 or segments == 1:
        return functions
    parts = split(range(functions), segments)
    # While backward is in a segment, the inputs of those before it wait.
    return max(i + _live(len(part), segments, levels - 1) for i, part in enumerate(parts))


def _root(n: int, degree: int) -> int:
    k = 1
    while k**degree < n:
        k += 1
    return k


def _checked(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, not {value}")
    return value
