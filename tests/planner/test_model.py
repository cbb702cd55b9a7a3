"""The model of a step: its two forms agree, a simulation agrees with it, plans can be run."""

import math
import random
from dataclasses import replace

import pytest
import torch

from offload.planner.batch import Evaluator
from offload.planner.model import Chain, Option, Segment, Shared
from offload.planner.predict import Walk, caps, predict
from tests.planner.chains import random_chain
from tests.planner.simulation import simulate

CHAINS = 1000


def random_choices(rng: random.Random, chain: Chain, count: int) -> torch.Tensor:
    """Plans of few or many kinds, so that some of them fit."""
    rows = []
    for _ in range(count):
        kinds = rng.sample(range(12), rng.randint(1, 4))
        rows.append([rng.choice(kinds) % len(s.options) for s in chain.segments])
    return torch.tensor(rows)


def test_many_at_once_are_the_same_as_one_at_a_time() -> None:
    rng = random.Random(1)
    finite = 0
    for _ in range(40):
        chain = random_chain(rng, rng.choice((1, 2, 5, 9)))
        choices = random_choices(rng, chain, 30)
        for row, seconds in zip(choices.tolist(), Evaluator(chain)(choices).tolist(), strict=True):
            assert seconds == pytest.approx(predict(chain, row).seconds, rel=1e-9)
            finite += math.isfinite(seconds)
    assert finite > 200


def test_every_plan_runs_within_its_budgets_and_to_its_end() -> None:
    """The events of a simulated runtime under the reserve rule: no budget is passed, none is
    waited for without end, and the time is what the recurrence says.
    """
    rng = random.Random(2)
    ratios, tried = [], 0
    while len(ratios) < CHAINS:
        chain = random_chain(rng, rng.choice((3, 4, 6, 8)))
        choices = random_choices(rng, chain, 24)
        times = Evaluator(chain)(choices)
        tried += 1
        assert tried < 3 * CHAINS
        if not bool(times.isfinite().any()):
            continue
        i = int(times.argmin())
        run = simulate(chain, choices[i].tolist())
        assert not run.stuck
        assert not run.over_budget
        ratios.append(run.seconds / float(times[i]))
    ratios.sort()
    assert 0.99 < ratios[len(ratios) // 2] < 1.01
    assert ratios[int(0.95 * len(ratios))] < 1.03


def test_a_plan_without_reserve_is_refused() -> None:
    """Room that a later segment needs cannot be kept by an earlier one."""
    keep = Option("keep", resident_bytes=10, present_bytes=10)
    small = Segment("small", 1.0, 2.0, 10, (keep,))
    large = Segment("large", 1.0, 2.0, 10, (keep,), forward_bytes=0, backward_bytes=15)
    assert predict(Chain((small, large), 34), (0, 0)).seconds == math.inf
    assert predict(Chain((small, large), 35), (0, 0)).seconds == 6.0
    assert predict(Chain((large, small), 25), (0, 0)).seconds == 6.0


def test_what_two_segments_save_counts_once_or_stays() -> None:
    keep = Option("keep", resident_bytes=10, present_bytes=10, holds_output=True)
    away = Option("host", offload_bytes=10, present_bytes=10, frees_input=True)
    first = Segment("0", 1.0, 1.0, 10, (keep, away))
    second = Segment("1", 1.0, 1.0, 10, (keep, away), shared=(Shared(1, 4),))
    third = Segment("2", 1.0, 1.0, 10, (keep,))
    chain = Chain((first, second, third), 1000, 1e9, 1e9, window_bytes=0, prefetch_bytes=0)
    kept = predict(chain, (0, 0, 0)).peak_device_bytes
    assert kept == 30
    # The first holds what the second sends away: 4 bytes of it stay.
    assert predict(chain, (0, 1, 0)).peak_device_bytes == pytest.approx(10 + 4 + 10, abs=1)
    assert predict(chain, (1, 1, 0)).peak_device_bytes == pytest.approx(10, abs=1)


def test_the_floor_is_what_the_segment_that_needs_most_needs() -> None:
    rng = random.Random(3)
    for _ in range(50):
        chain = random_chain(rng, 6)
        floor, name = chain.floor()
        assert name in {s.name for s in chain.segments}
        every = torch.cartesian_prod(*[torch.arange(len(s.options)) for s in chain.segments[:3]])
        short = Chain(chain.segments[:3], Chain(chain.segments[:3], 0.0).floor()[0] * 0.999)
        assert not bool(Evaluator(short)(every).isfinite().any())
        assert floor > 0


def test_two_storages_pass_a_window_however_large() -> None:
    """Of three segments each brings back one storage of 8, in twice the time of its backward."""
    option = Option("host", offload_bytes=8, present_bytes=8, pieces=(8.0,))
    layers = tuple(Segment(str(i), 1.0, 1.0, 8, (option,)) for i in range(3))
    chain = Chain(layers, 1000, 1e9, 4, prefetch_bytes=1)
    assert chain.widened(1) == 16 and chain.widened(20) == 20 and chain.widened(0) == 0
    wide, narrow = (predict(replace(chain, prefetch_bytes=n), (0, 0, 0)) for n in (1, 0))
    assert wide.seconds == predict(replace(chain, prefetch_bytes=16), (0, 0, 0)).seconds
    assert wide.seconds < narrow.seconds
    rooms = caps(Walk(replace(chain, prefetch_bytes=1), (0, 0, 0)))
    assert rooms == [992] * 3, (
        "the window is the runtime's own, and not what segments leave room for"
    )
