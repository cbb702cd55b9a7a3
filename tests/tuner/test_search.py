"""The search and the decision, against a machine that is a function."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.tuner import Choice, Limits, Setting, TimedSteps, Trial
from offload.tuner.decide import decide, pareto
from offload.tuner.replay import ReplayedStep
from offload.tuner.search import Calibration, Candidate, calibrated, search
from offload.units import KIB, MIB
from tests.tuner.steps import setting

BASE = Calibration(plain_seconds=1.0)


def candidate(seconds: float, live: int, moved: int = 0, number: int = 0) -> Candidate:
    return Candidate(
        setting(keep_last_bytes=number), ReplayedStep(seconds, 0, 0, live, moved, 1)
    )  # fmt: skip


def measured(ratio: float, live: int) -> TimedSteps:
    return TimedSteps([ratio], [1.0], live)


class Machine:
    """Measures what it is told to, and counts."""

    def __init__(self, truth: dict[Setting, TimedSteps]) -> None:
        self.truth = truth
        self.asked: list[Setting] = []

    def __call__(self, setting: Setting) -> TimedSteps:
        self.asked.append(setting)
        return self.truth[setting]


def run(
    candidates: list[Candidate], limits: Limits, machine: Machine, max_trials: int = 8
) -> list[Trial]:
    return search(
        candidates, limits, BASE, machine, max_trials=max_trials, budget_seconds=1e9
    )  # fmt: skip


def exactly(candidates: list[Candidate]) -> Machine:
    """A machine that does what was predicted."""
    return Machine(
        {c.setting: measured(c.predicted.seconds, c.predicted.peak_live_bytes) for c in candidates}
    )


LADDER = [candidate(2.0 - i / 10, (10 + 10 * i) * MIB, (100 - i) * MIB, i) for i in range(10)]


def test_a_true_prediction_needs_one_trial() -> None:
    for limits, best in [
        (Limits(max_live_bytes=45 * MIB), 3),
        (Limits(max_overhead=0.35), 7),
        (Limits(max_live_bytes=85 * MIB, max_overhead=0.5), 7),
    ]:
        machine = exactly(LADDER)
        (trial,) = run(LADDER, limits, machine)
        assert trial.setting == LADDER[best].setting == machine.asked[0]


def test_of_equally_fast_settings_the_one_that_moves_least_is_tried() -> None:
    candidates = [candidate(1.0 + i / 1000, 10 * MIB, (5 - i) * MIB, i) for i in range(4)]
    (trial,) = run(candidates, Limits(max_live_bytes=20 * MIB), exactly(candidates))
    assert trial.setting == candidates[3].setting


def test_what_moving_costs_is_learned() -> None:
    """Each byte costs more than was predicted: what moves less wins in the end."""
    candidates = [candidate(1.0 + 0.02 * i, 10 * MIB, (100 - 20 * i) * MIB, i) for i in range(5)]
    truth = {
        c.setting: measured(c.predicted.seconds + c.predicted.moved_bytes / (200 * MIB), 10 * MIB)
        for c in candidates
    }
    trials = run(candidates, Limits(max_live_bytes=20 * MIB), Machine(truth))
    best = min(truth, key=lambda s: truth[s].ratio)
    assert min(trials, key=lambda t: t.measured.ratio).setting == best
    assert len(trials) < len(candidates)
    assert trials[-1].predicted_ratio == pytest.approx(trials[-1].measured.ratio, rel=0.02)


def test_more_alive_than_predicted_is_learned() -> None:
    truth = {
        c.setting: measured(c.predicted.seconds, c.predicted.peak_live_bytes + 7 * MIB)
        for c in LADDER
    }
    trials = run(LADDER, Limits(max_live_bytes=45 * MIB), Machine(truth))
    assert [t.measured.peak_live_bytes <= 45 * MIB for t in trials] == [False, True]


def test_it_ends_at_its_limits() -> None:
    liar = Machine({c.setting: measured(3.0, 1000 * MIB) for c in LADDER})
    assert len(run(LADDER, Limits(max_live_bytes=45 * MIB), liar, max_trials=4)) == 4
    ticks = iter(range(100))
    trials = search(
        LADDER, Limits(max_live_bytes=45 * MIB), BASE, liar, max_trials=99, budget_seconds=3,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    assert len(trials) == 2
    assert run([], Limits(max_overhead=0.1), liar) == []


def test_what_the_replay_cannot_tell_apart_is_tried_once() -> None:
    same = [candidate(1.5, 50 * MIB, MIB, i) for i in range(5)]
    machine = exactly(same)
    run(same, Limits(max_live_bytes=10 * MIB), machine)
    assert len(machine.asked) == 1


@given(
    st.lists(st.tuples(st.floats(1, 3), st.integers(1, 100)), min_size=1, max_size=30),
    st.integers(1, 100),
)
def test_with_a_true_model_nothing_beats_what_is_found(
    pairs: list[tuple[float, int]], limit: int
) -> None:
    candidates = [candidate(s, live * MIB, 0, i) for i, (s, live) in enumerate(pairs)]
    limits = Limits(max_live_bytes=limit * MIB)
    trials = run(candidates, limits, exactly(candidates), max_trials=len(candidates))
    fitting = [s for s, live in pairs if live * 1.02 <= limit]
    best = min(trials, key=lambda t: t.score(limits)).measured
    if fitting:
        assert best.peak_live_bytes <= limit * MIB
        assert best.ratio <= min(fitting) + 0.0151
    assert len({t.setting for t in trials}) == len(trials)


def test_calibration_never_makes_moving_cheaper_than_predicted() -> None:
    p = ReplayedStep(1.2, 0, 0, 10, 100, 1)
    assert calibrated(BASE, [(p, measured(1.0, 5))]) == replace(BASE, live_bytes=-5)
    assert calibrated(BASE, []) is BASE


# -- the decision ----------------------------------------------------------------------------------

PLAIN = measured(1.0, 100 * MIB)


def trial(ratio: float, live: int) -> Trial:
    return Trial(setting(), ratio, live, 50 * MIB, measured(ratio, live))


DECISIONS = {
    "it fits as it is": (
        None, [], Limits(max_live_bytes=100 * MIB), Choice.PLAIN, "nothing to gain",
    ),
    "offloading is faster": (
        measured(1.3, 30 * MIB), [trial(1.1, 40 * MIB)], Limits(max_live_bytes=50 * MIB),
        Choice.OFFLOAD, "offloading takes 1.10 of plain's time and 40 MiB; recomputing 1.30",
    ),
    "recomputing is faster": (
        measured(1.1, 30 * MIB), [trial(1.3, 40 * MIB)], Limits(max_live_bytes=50 * MIB),
        Choice.CHECKPOINT, "recomputing takes 1.10",
    ),
    "a tie, and recomputing holds less": (
        measured(1.105, 30 * MIB), [trial(1.1, 40 * MIB)], Limits(max_live_bytes=50 * MIB),
        Choice.CHECKPOINT, "recomputing",
    ),
    "recomputing does not fit": (
        measured(1.1, 60 * MIB), [trial(1.3, 40 * MIB)], Limits(max_live_bytes=50 * MIB),
        Choice.OFFLOAD, "offloading takes 1.30",
    ),
    "offloading does not fit": (
        measured(1.3, 40 * MIB), [trial(1.1, 60 * MIB)], Limits(max_live_bytes=50 * MIB),
        Choice.CHECKPOINT, "recomputing takes 1.30",
    ),
    "nothing fits": (
        measured(1.3, 60 * MIB), [trial(1.1, 70 * MIB)], Limits(max_live_bytes=50 * MIB),
        Choice.NOTHING, "nothing keeps to the 50 MiB allowed; the least alive was 1.30",
    ),
    "what fits is too slow": (
        None, [trial(1.5, 40 * MIB)], Limits(max_live_bytes=50 * MIB, max_overhead=0.1),
        Choice.NOTHING, "too slow: the fastest takes 1.50",
    ),
    "the fewest bytes in the time allowed": (
        measured(1.3, 10 * MIB), [trial(1.04, 50 * MIB), trial(1.01, 60 * MIB)],
        Limits(max_overhead=0.05), Choice.OFFLOAD, "1.04 of plain's time and 50 MiB",
    ),
    "recomputing in the time allowed": (
        measured(1.04, 10 * MIB), [trial(1.04, 50 * MIB)], Limits(max_overhead=0.05),
        Choice.CHECKPOINT, "10 MiB",
    ),
    "all too slow": (
        None, [trial(1.2, 50 * MIB)], Limits(max_overhead=0.05),
        Choice.NOTHING, "nothing stays within 1.05",
    ),
    "too little saved": (
        None, [trial(1.0, 95 * MIB)], Limits(max_overhead=0.05), Choice.PLAIN, "not worth a",
    ),
    "nothing tried": (None, [], Limits(max_overhead=0.05), Choice.NOTHING, "nothing could be"),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_decision(name: str) -> None:
    recomputed, trials, limits, choice, why = DECISIONS[name]
    found = decide(PLAIN, recomputed, trials, limits)
    assert found.choice is choice
    assert why in found.why
    assert (found.trial is not None) == (choice is Choice.OFFLOAD)


def test_the_default_limit() -> None:
    assert Limits.given(None, None) == Limits(None, 0.05)
    assert Limits.given(5, None) == Limits(5, None)


@given(st.lists(st.tuples(st.floats(1, 3), st.integers(1, 100)), min_size=1, max_size=40))
def test_the_curve_has_only_settings_that_none_beats(pairs: list[tuple[float, int]]) -> None:
    candidates = [candidate(s, live * KIB, 0, i) for i, (s, live) in enumerate(pairs)]
    curve = pareto(candidates, BASE, points=8)
    assert 0 < len(curve) <= 8
    ratios, lives = [r for _, r, _ in curve], [b for *_, b in curve]
    assert ratios == sorted(ratios, reverse=True) and lives == sorted(lives)
    assert lives[0] == min(live for _, live in pairs) * KIB
    for _, ratio, live in curve:
        assert not any(s < ratio - 1e-3 and n * KIB <= live for s, n in pairs)
