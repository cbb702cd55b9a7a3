"""The search for a plan: what to keep, offload and recompute, within budgets, in the least time.

A schedule is hardly ever far from a simple shape: the last segments keep everything, as backward
begins with them; of the others some are offloaded, spread evenly so that the link always has time
for the next, and the rest is recomputed. So the search evaluates all shapes of that kind at once
(as ProTrain does for one of each kind: Yang et al., ProTrain: Efficient LLM Training via
Memory-Aware Techniques, 2024), and improves the best of them by changing one segment and by
exchanging two, until no such change helps. Deterministic: the same chain gives the same plan.

``lower_bound`` is a relaxation that no plan beats: segments may be divided, options mixed, and
boundaries and the host's memory cost nothing. One number then remains, the bytes given up for
recomputation; in it the time is convex.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from offload.errors import PlanError
from offload.planner.batch import Evaluator
from offload.planner.exact import solve_exact
from offload.planner.model import Chain, Option, Segment
from offload.units import format_bytes

__all__ = ["Solution", "check_floor", "lower_bound", "solve"]

_SHAPES = 10_000  # beyond it, the numbers of kept and offloaded segments are sampled
_STARTS = 6  # shapes that are improved, of short chains
_WORK = 256  # segments times starts, of long ones
_ROUNDS = 60  # of improvement, at most
_SWAP_DISTANCES = (1, 2, 3, 5, 8, 13)
_WORTH_MORE = 1.003  # of the bound: beyond it the search goes on
_WALKS = 192
_MOST_ROUNDS = 400
_ANNEALING_WORK = 6000  # segments times rounds
_BETTER = 1 - 1e-9


@dataclass(frozen=True)
class Solution:
    """A plan for a chain.

    Attributes:
        choice: for each segment the number of its option.
        seconds: what it takes, by the model.
        bound_seconds: no plan takes less.
        gap: by what part of its time it may be slower than the best, as far as is known.
        solver: what found it.
    """

    choice: tuple[int, ...]
    seconds: float
    bound_seconds: float
    gap: float
    solver: str


def solve(chain: Chain, *, solver: str = "search", seconds: float = 30.0) -> Solution:
    """A fast plan within the budgets of ``chain``.

    Args:
        chain: the segments and budgets.
        solver: ``"search"``, or ``"exact"`` (needs scipy): an integer program, which is proven
            best if it ends in time and no worse than the search otherwise.
        seconds: time limit of the exact solver.

    Raises:
        PlanError: no plan fits; the message names the floor and the segment that sets it.
        ValueError: another solver.
        OffloadError: scipy is not installed.

    Example:
        >>> keep = Option("keep", resident_bytes=8, present_bytes=8)
        >>> again = Option("recompute", resident_bytes=1, present_bytes=1, backward_seconds=1.0)
        >>> layers = tuple(Segment(str(i), 1.0, 2.0, 8, (keep, again)) for i in range(4))
        >>> found = solve(Chain(layers, device_bytes=20))
        >>> [layers[i].options[k].action for i, k in enumerate(found.choice)]
        ['recompute', 'recompute', 'keep', 'keep']
    """
    if solver not in ("search", "exact"):
        raise ValueError(f'solver is {solver!r}; choose "search" or "exact"')
    bound = lower_bound(chain)
    choice, best = search(chain)
    gap = 1 - bound / best if math.isfinite(best) and best else 0.0
    if solver == "exact":
        found = solve_exact(chain, seconds=seconds, gap=1e-4)
        if found.choice is not None:
            exact = float(Evaluator(chain)(torch.tensor([found.choice]))[0])
            if exact <= best:
                choice, best = found.choice, exact
            gap = min(gap, found.gap)
    if not math.isfinite(best):
        raise _refusal(chain)
    return Solution(choice, best, bound, gap, solver)


def check_floor(chain: Chain) -> None:
    """Raise ``PlanError`` if no choice of options fits into the device memory of ``chain``."""
    if chain.device_bytes < chain.floor()[0]:
        raise _refusal(chain)


def _refusal(chain: Chain) -> PlanError:
    floor, name = chain.floor()
    budget = chain.device_bytes
    if budget < floor:
        return PlanError(
            f"no plan fits: segment {name!r} needs {format_bytes(floor)} for activations while it "
            f"runs, and the device budget leaves {format_bytes(max(0.0, budget))}. Raise the "
            "budget, split that segment into smaller ones, or lower the batch"
        )
    return PlanError(
        f"no plan was found: {format_bytes(budget)} of device memory would do for the segment that "
        f"needs most ({name!r}, {format_bytes(floor)}), but host memory "
        f"({_limit(chain.host_bytes)}) and disk ({_limit(chain.disk_bytes)}) do not hold what has "
        f"to leave. Raise one of the budgets{_unknown_disk(chain)}"
    )


def _unknown_disk(chain: Chain) -> str:
    if any(o.disk_bytes for s in chain.segments for o in s.options):
        return ""
    return "; or let `offload probe` measure the disk, without whose rates it is not planned with"


def _limit(nbytes: float) -> str:
    return format_bytes(nbytes) if math.isfinite(nbytes) else "without a limit"


# -- shapes ---------------------------------------------------------------------------------------


def search(chain: Chain) -> tuple[tuple[int, ...], float]:
    """The best plan found, and its seconds: infinite if none fits."""
    evaluate = Evaluator(chain)
    kept = _everything_kept(chain)
    if kept is not None:  # nothing takes less; others may seem to take as little
        seconds = float(evaluate(torch.tensor([kept]))[0])
        if math.isfinite(seconds):
            return kept, seconds
    good_enough = lower_bound(chain) * (1 + 1e-6)
    wanted = max(2, min(_STARTS, _WORK // len(chain.segments)))
    shapes = _shapes(chain)
    times = evaluate(shapes)
    order = times.argsort(stable=True)
    starts: list[Tensor] = []
    seen: set[tuple[int, ...]] = set()
    for i in order.tolist():
        if len(starts) == wanted or not math.isfinite(float(times[i])):
            break
        kinds = tuple(sorted(set(shapes[i].tolist())))
        if kinds not in seen:  # the best of each mixture
            seen.add(kinds)
            starts.append(shapes[i])
    if not starts:
        leanest = chain.leanest(chain.device_bytes * (1 + 1e-9))
        if len(leanest) < len(chain.segments):
            return tuple(len(s.options) - 1 for s in chain.segments), math.inf
        starts = [torch.tensor(leanest)]
    best, choice = math.inf, starts[0]
    for start in starts:
        if best <= good_enough:
            break
        improved, seconds = _improve(evaluate, start)
        if seconds < best * _BETTER:
            best, choice = seconds, improved
    if best > good_enough * _WORTH_MORE and math.isfinite(best):
        choice, best = _anneal(evaluate, choice, best)
    return tuple(choice.tolist()), best


def _everything_kept(chain: Chain) -> tuple[int, ...] | None:
    actions = [[option.action for option in segment.options] for segment in chain.segments]
    if any("keep" not in listed for listed in actions):
        return None
    return tuple(listed.index("keep") for listed in actions)


def _anneal(evaluate: Evaluator, start: Tensor, seconds: float) -> tuple[Tensor, float]:
    """Many walks at once from the best plan, each taking a random step that makes it slower with a
    chance that falls; then the best plan that any has seen is improved once more.
    """
    generator = torch.Generator().manual_seed(0)  # the same chain gives the same plan
    length, walks = len(start), torch.arange(_WALKS)
    widths = torch.tensor(evaluate.widths)
    current, times = start.repeat(_WALKS, 1), torch.full((_WALKS,), seconds, dtype=torch.float64)
    best, choice = seconds, start
    rounds = max(40, min(_MOST_ROUNDS, _ANNEALING_WORK // length))
    for number in range(rounds):
        tried = current.clone()
        i, j = torch.randint(length, (2, _WALKS), generator=generator)
        drawn = torch.rand(3, _WALKS, generator=generator, dtype=torch.float64)
        swap = (drawn[0] < 0.4) & (current[walks, j] < widths[i]) & (current[walks, i] < widths[j])
        fresh = (drawn[1] * widths[i]).long()
        tried[walks, i] = torch.where(swap, current[walks, j], fresh)
        tried[walks, j] = torch.where(swap, current[walks, i], tried[walks, j])
        found = evaluate(tried)
        heat = seconds * 0.01 * 0.01 ** (number / rounds)  # from a hundredth of the time
        taken = found < times - heat * drawn[2].log()
        current[taken], times[taken] = tried[taken], found[taken]
        k = int(times.argmin())
        if float(times[k]) < best * _BETTER:
            best, choice = float(times[k]), current[k].clone()
    return _improve(evaluate, choice)


def _shapes(chain: Chain) -> Tensor:
    """Plans that keep the last, spread what is offloaded, and recompute the rest."""
    number_of = [{o.action: k for k, o in enumerate(s.options)} for s in chain.segments]
    actions = list(dict.fromkeys(a for numbers in number_of for a in numbers))
    # What a segment does not offer, it replaces by its last option, the leanest by convention.
    column_of = {
        a: torch.tensor([n.get(a, len(n) - 1) for n in number_of], dtype=torch.int64)
        for a in actions
    }
    columns = [[column_of[a] for a in actions if _kind(a) == kind] for kind in range(3)]
    leanest = torch.tensor([len(n) - 1 for n in number_of])
    mixtures = list(itertools.product(*(c or [leanest] for c in columns)))
    patterns = _patterns(len(chain.segments), _SHAPES // len(mixtures))
    made = [torch.stack(kinds).gather(0, patterns) for kinds in mixtures]
    plans: Tensor = torch.unique(torch.cat(made), dim=0)
    return plans


def _kind(action: str) -> int:
    """0: stays on the device; 1: leaves; 2: is given up."""
    if action.startswith("recompute"):
        return 2
    return 0 if action in ("keep", "selective+keep") else 1


def _patterns(length: int, most: int) -> Tensor:
    """At most about ``most`` rows of 0 (keep), 1 (offload), 2 (recompute): a row for two counts."""
    pairs = [(k, o) for k in range(length + 1) for o in range(length - k + 1)]
    step = math.ceil(math.sqrt(len(pairs) / most))
    if step > 1:
        pairs = [(k, o) for k, o in pairs if k % step == 0 and (o % step == 0 or k + o == length)]
    kept = torch.tensor([k for k, _ in pairs])[:, None]
    away = torch.tensor([o for _, o in pairs])[:, None]
    rest = (length - kept).clamp(min=1)
    place = torch.arange(length)[None]
    # Bresenham: `away` of `rest` places, as evenly as whole numbers allow.
    is_away = (place + 1) * away // rest - place * away // rest > 0
    pattern = torch.where(is_away, 1, 2)
    return torch.where(place >= length - kept, 0, pattern)


# -- improvement ----------------------------------------------------------------------------------


def _improve(evaluate: Evaluator, start: Tensor) -> tuple[Tensor, float]:
    """Change one segment, exchange two, or change two neighbours, while that helps."""
    best = float(evaluate(start[None])[0])
    current = start
    for _ in range(_ROUNDS):
        neighbours = _neighbours(evaluate, current)
        if not len(neighbours):
            break
        times = evaluate(neighbours)
        order = times.argsort(stable=True)[:32]
        if not float(times[order[0]]) < best * _BETTER:
            break
        current, best = _combined(evaluate, current, neighbours[order], times[order])
    return current, best


def _combined(
    evaluate: Evaluator, current: Tensor, ranked: Tensor, times: Tensor
) -> tuple[Tensor, float]:
    """The best of: the first of ``ranked`` alone, the first two together, and so on."""
    together, prefixes = current.clone(), []
    for row in ranked:
        changed = row != current
        if not bool((together != current)[changed].any()):  # those that meet leave the later out
            together = torch.where(changed, row, together)
            prefixes.append(together.clone())
    tried = torch.stack(prefixes)
    seconds = evaluate(tried)
    i = int(seconds.argmin())
    if float(seconds[i]) <= float(times[0]):
        return tried[i], float(seconds[i])
    return ranked[0], float(times[0])


def _neighbours(evaluate: Evaluator, current: Tensor) -> Tensor:
    length, widths = len(current), evaluate.widths
    changes = [(i, k) for i in range(length) for k in range(widths[i]) if k != int(current[i])]
    rows = current.repeat(len(changes), 1)
    if changes:
        where = torch.tensor(changes)
        rows[torch.arange(len(changes)), where[:, 0]] = where[:, 1]
    values = current.tolist()
    swaps = [
        (i, j, values[j], values[i])
        for i in range(length)
        for j in (i + d for d in _SWAP_DISTANCES)
        if j < length
        and values[i] != values[j]
        and max(values[i], values[j]) < min(widths[i], widths[j])
    ]
    swapped = current.repeat(len(swaps), 1)
    if swaps:
        where = torch.tensor(swaps)
        every = torch.arange(len(swaps))
        swapped[every, where[:, 0]] = where[:, 2]
        swapped[every, where[:, 1]] = where[:, 3]
    return torch.cat([rows, swapped])


# -- the bound ------------------------------------------------------------------------------------


def lower_bound(chain: Chain) -> float:
    """Seconds that no plan for ``chain`` can do better than.

    With ``A`` all bytes that are saved, ``x`` those given up and ``g(x)`` the least seconds of
    recomputation for that (dividing segments, the cheapest first)::

        min over x of  max(T_F, (A - x - M) / v_out) + max(T_B + g(x), (A - x - M) / v_back)

    as at most ``M`` bytes are on the device when forward ends, and what is neither there nor given
    up has left by then and comes back later.

    Example:
        >>> keep = Option("keep", resident_bytes=8, present_bytes=8)
        >>> again = Option("recompute", resident_bytes=1, present_bytes=1, backward_seconds=1.0)
        >>> layers = tuple(Segment(str(i), 1.0, 2.0, 8, (keep, again)) for i in range(4))
        >>> round(lower_bound(Chain(layers, device_bytes=20)), 3)
        13.714
    """
    forward = sum(s.forward_seconds for s in chain.segments)
    backward = sum(s.backward_seconds for s in chain.segments)
    slopes = sorted(slope for s in chain.segments for slope in _hull(s))
    saved = sum(max(_held(o) for o in s.options) for s in chain.segments)
    given_up = spent = 0.0
    can_move = any(o.offload_bytes for s in chain.segments for o in s.options)

    def seconds(given_up: float, spent: float) -> float:
        moved = max(0.0, saved - given_up - chain.device_bytes)
        if moved > 1e-6 and not can_move:
            return math.inf
        return max(forward, moved / chain.out_rate) + max(backward + spent, moved / chain.back_rate)

    # Convex, with its corners where a segment is used up, a link catches up, or all fits.
    best = seconds(0.0, 0.0)
    for rate, nbytes in slopes:
        corners = {nbytes, saved - chain.device_bytes - given_up}
        for limit, link in ((forward, chain.out_rate), (backward + spent, chain.back_rate)):
            corners.add(saved - chain.device_bytes - limit * link - given_up)
        # backward + spent + rate x = (saved - given_up - x - M) / back
        moved = saved - given_up - chain.device_bytes
        corners.add((moved / chain.back_rate - backward - spent) / (rate + 1 / chain.back_rate))
        for x in corners:
            if 0 <= x <= nbytes:
                best = min(best, seconds(given_up + x, spent + rate * x))
        given_up, spent = given_up + nbytes, spent + rate * nbytes
    return best


def _held(option: Option) -> float:
    """Bytes that have to be somewhere between forward and backward."""
    return option.resident_bytes + option.offload_bytes


def _hull(segment: Segment) -> Iterable[tuple[float, float]]:
    """Seconds for a byte and bytes, in rising order: the lower convex hull of the options."""
    points = sorted((-_held(o), o.forward_seconds + o.backward_seconds) for o in segment.options)
    points = [(points[0][0], min(c for b, c in points if b == points[0][0])), *points]
    at, cost = points[0]
    while True:
        ahead = [((c - cost) / (b - at), b, c) for b, c in points if b > at]
        if not ahead:
            return
        slope, b, c = min(ahead)
        yield max(0.0, slope), b - at
        at, cost = b, c
