"""checkpoint_sequential: a chain of functions in checkpointed segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import nn

from offload.recompute.checkpoint import checkpoint
from offload.recompute.regions import Composed
from offload.recompute.schedule import Schedule, split

__all__ = ["checkpoint_sequential"]


def checkpoint_sequential(
    functions: nn.Sequential | Iterable[Callable[..., Any]],
    segments: int | Literal["sqrt", "auto"],
    *inputs: Any,
    levels: int = 1,
    preserve_rng_state: bool = True,
) -> Any:
    """Run ``functions`` one after the other, in segments that keep only their inputs.

    As in ``torch.utils.checkpoint.checkpoint_sequential``, every segment but the last is
    checkpointed: backward begins with the last, which would be computed twice in a row. Segments
    are of nearly equal length. Inside a step of a session their inputs wait on its tiers.

    With ``levels`` above 1, segments are cut into segments in the same way, so that one inside
    another keeps its input only while the outer one is in backward: less memory, more computation.
    ``offload.recompute.Schedule`` tells how much of each.

    ======================================  ==============  ===================
    for n functions                         inputs alive    calls of functions
    ======================================  ==============  ===================
    ``segments="sqrt"``                     2 sqrt(n)       2 n
    ``segments="sqrt", levels=2``           3 cbrt(n)       3 n
    ``segments=2, levels=ceil(log2(n))``    log2(n) + 1     n (1 + log2(n) / 2)
    ======================================  ==============  ===================

    Args:
        functions: an ``nn.Sequential``, whose children are called and not itself, or modules and
            other callables. The first is called with ``inputs``, every other with the one result of
            the one before.
        segments: how many; ``"sqrt"``: about ``sqrt(n)`` of them, and with more levels the
            ``levels + 1``-th root; ``"auto"``: the same, but no checkpoint at all for fewer than 4
            functions, where it would save nothing. More than there are functions: one for each.
        *inputs: of the first function; anything that ``offload.checkpoint`` takes.
        levels: how often to cut.
        preserve_rng_state: make dropout and the like draw the same numbers again.

    Returns:
        What the last function returns.

    Raises:
        TypeError: something that cannot be called, or a number of another type.
        ValueError: no functions, a number below 1, another word than those above.

    Example:
        >>> import torch, offload
        >>> blocks = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(9)))
        >>> x = torch.ones(2, 8, requires_grad=True)
        >>> checkpoint_sequential(blocks, "sqrt", x).sum().backward()
        >>> x.grad.shape
        torch.Size([2, 8])

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016, sections 3 and 4.3.
    """
    chain = list(functions)  # of an nn.Sequential also a child that occurs twice
    for number, function in enumerate(chain):
        if not callable(function):
            raise TypeError(f"function {number} is {function!r}, which cannot be called")
    schedule = Schedule.of(len(chain), segments, levels)
    return _Part(chain, schedule.segments, schedule.levels, preserve_rng_state)(*inputs)


class _Part(Composed):
    """Some functions in a row, with what is left to cut of them."""

    __slots__ = ("_levels", "_preserve_rng_state", "_segments")

    def __init__(
        self, functions: list[Callable[..., Any]], segments: int, levels: int, rng: bool
    ) -> None:
        super().__init__(functions)
        self._segments = segments
        self._levels = levels
        self._preserve_rng_state = rng

    def __call__(self, *inputs: Any) -> Any:
        # A loop, and one name for what passes through: a frame of a call for the last segment would
        # hold that segment's input for as long as it runs.
        rest = self.functions
        for levels in reversed(range(self._levels)):
            *segments, last = split(range(len(rest)), self._segments)
            for segment in segments:
                part = _Part(
                    rest[segment.start : segment.stop],
                    self._segments,
                    levels,
                    self._preserve_rng_state,
                )
                inputs = (checkpoint(part, *inputs, preserve_rng_state=self._preserve_rng_state),)
            rest = rest[last.start :]
        for function in rest:
            inputs = (function(*inputs),)
        return inputs[0]
