"""The arithmetic of schedules, against a walk through them and against the theory."""

import math

import checkpoint_schedules
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.recompute import Schedule
from offload.recompute.schedule import split

lengths = st.integers(1, 300)
counts = st.integers(1, 20)
depths = st.integers(1, 9)


@given(st.integers(-5, 5), lengths, st.integers(1, 400))
def test_split_covers_the_range_evenly(start, n, segments):
    parts = split(range(start, start + n), segments)
    assert [i for part in parts for i in part] == list(range(start, start + n))
    sizes = [len(part) for part in parts]
    assert len(parts) == min(segments, n)
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == max(sizes)


def walk(functions, segments, levels, waiting, log):
    """Forward and backward of ``functions``, which are being evaluated for the first time.

    ``waiting`` is the number of inputs held elsewhere. Logs every evaluation, and what is alive
    when backward reaches each innermost segment.
    """
    parts = split(functions, segments) if levels else [functions]
    log["evaluations"] += len(functions)
    backward(parts, segments, levels, waiting, log)


def backward(parts, segments, levels, waiting, log):
    for i, part in reversed(list(enumerate(parts))):
        if i < len(parts) - 1:
            log["evaluations"] += len(part)
        if levels > 1 and len(part) > 1:
            backward(split(part, segments), segments, levels - 1, waiting + i, log)
        else:
            log["live"] = max(log["live"], waiting + i + len(part))


@given(lengths, counts, depths)
def test_measures_are_those_of_a_walk(n, segments, levels):
    log = {"evaluations": 0, "live": 0}
    walk(range(n), segments, levels, 0, log)
    schedule = Schedule.of(n, segments, levels)
    assert (schedule.evaluations(), schedule.live()) == (log["evaluations"], log["live"])


@given(st.integers(2, 6), st.integers(1, 4), st.integers(1, 5))
def test_closed_forms_where_all_is_even(segments, levels, leaf):
    n = segments**levels * leaf
    schedule = Schedule.of(n, segments, levels)
    assert schedule.evaluations() == n + levels * (n - n // segments)
    assert schedule.live() == levels * (segments - 1) + leaf


@given(lengths)
def test_square_root(n):
    """Chen et al., section 3: twice the root in memory, twice the forward in time."""
    schedule = Schedule.of(n, "sqrt")
    assert schedule.segments == math.isqrt(n - 1) + 1
    assert schedule.live() <= 2 * math.sqrt(n) + 1
    assert schedule.evaluations() <= 2 * n - 1 or n == 1


@given(lengths, depths)
def test_root_of_more_levels(n, levels):
    schedule = Schedule.of(n, "sqrt", levels)
    root = n ** (1 / (levels + 1))
    assert root - 1e-9 <= schedule.segments < root + 1 + 1e-9
    assert schedule.live() <= (levels + 1) * (schedule.segments - 1) + 1
    assert schedule.evaluations() <= (levels + 1) * n


@given(lengths)
def test_logarithm(n):
    """Chen et al., section 4.3."""
    levels = max(1, math.ceil(math.log2(n)))
    schedule = Schedule.of(n, 2, levels)
    assert schedule.live() <= levels + 1
    assert schedule.evaluations() <= n + n * levels / 2 + 1


@given(lengths, counts, depths)
def test_more_levels_never_hold_more(n, segments, levels):
    schedule, deeper = Schedule.of(n, segments, levels), Schedule.of(n, segments, levels + 1)
    assert deeper.live() <= schedule.live()
    assert schedule.evaluations() <= deeper.evaluations() <= (levels + 2) * n


def fewest(n, snapshots):
    """Evaluations of the best schedule there is: Griewank & Walther 2000, equation (3).

    ``repetition * n - beta(snapshots + 1, repetition - 1)`` steps forward, and one more with each
    step backward.
    """
    repetition = 0
    while math.comb(snapshots + repetition, snapshots) < n:
        repetition += 1
    return n + repetition * n - math.comb(snapshots + repetition, repetition - 1) if n > 1 else 1


@given(st.integers(2, 40), st.integers(1, 39))
def test_oracle_knows_the_closed_form(n, snapshots):
    snapshots = min(snapshots, n - 1)
    assert checkpoint_schedules.optimal_steps_binomial(n, snapshots) == fewest(n, snapshots)


def revolve(n, snapshots):
    """Evaluations of the schedule that ``checkpoint_schedules`` makes."""
    forward = checkpoint_schedules.Forward
    actions = checkpoint_schedules.Revolve(n, snapshots)
    return sum(action.n1 - action.n0 for action in actions if isinstance(action, forward))


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("segments", [2, 3, 4])
def test_against_revolve(segments, levels):
    """With segments down to single functions, as revolve has them: near the optimum, never below.

    The input of the function that is in backward is no snapshot.
    """
    n = segments**levels
    schedule = Schedule.of(n, segments, levels)
    best = revolve(n, schedule.live() - 1)
    assert best <= schedule.evaluations() <= 1.15 * best
    if levels == 1:
        assert schedule.evaluations() == best


@given(st.integers(2, 120), st.integers(2, 12), st.integers(1, 7))
def test_never_better_than_the_optimum(n, segments, levels):
    if segments**levels >= n:
        schedule = Schedule.of(n, segments, levels)
        if all(len(part) == 1 for part in leaves(range(n), segments, levels)):
            assert schedule.evaluations() >= fewest(n, schedule.live() - 1)


def leaves(functions, segments, levels):
    if levels == 0:
        return [functions]
    parts = split(functions, segments)
    return [leaf for part in parts for leaf in leaves(part, segments, levels - 1)]


def test_words():
    assert [Schedule.of(n, "auto").segments for n in (1, 2, 3, 4, 5, 9)] == [1, 1, 1, 2, 3, 3]
    assert [Schedule.of(n, "sqrt").segments for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 2, 2, 3, 3]
    assert Schedule.of(64, "sqrt", 2).segments == 4
    assert Schedule.of(3, "auto").evaluations() == 3


@pytest.mark.parametrize(
    ("segments", "levels", "error", "message"),
    [
        (0, 1, ValueError, "segments must be at least 1, not 0"),
        (-2, 1, ValueError, "segments must be at least 1"),
        (2, 0, ValueError, "levels must be at least 1, not 0"),
        ("root", 1, ValueError, 'segments is "sqrt", "auto" or a number, not \'root\''),
        (2.0, 1, TypeError, "segments must be a whole number, not 2.0"),
        (True, 1, TypeError, "segments must be a whole number, not True"),
        (2, "2", TypeError, "levels must be a whole number, not '2'"),
        (None, 1, TypeError, "segments must be a whole number, not None"),
    ],
)
def test_wrong_arguments(segments, levels, error, message):
    with pytest.raises(error, match=message):
        Schedule.of(10, segments, levels)


def test_no_functions():
    with pytest.raises(ValueError, match="at least one function"):
        Schedule.of(0, 2)
