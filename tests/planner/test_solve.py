"""The search: as good as the exact solver, never beyond the bound, and clear where nothing fits."""

import itertools
import math
import random

import pytest
import torch

from offload.errors import PlanError
from offload.planner.batch import Evaluator
from offload.planner.exact import solve_exact
from offload.planner.model import Chain, Option, Segment
from offload.planner.predict import predict
from offload.planner.solve import lower_bound, search, solve
from tests.planner.chains import random_chain, transformer_chain


@pytest.mark.parametrize("seed", range(12))
def test_search_is_within_a_percent_of_the_best(seed: int) -> None:
    pytest.importorskip("scipy")
    rng = random.Random(seed)
    chain = random_chain(rng, (8, 16, 24, 32)[seed % 4])
    choice, seconds = search(chain)
    exact = solve_exact(chain, seconds=20, gap=1e-3)
    assert exact.choice is not None
    best = predict(chain, exact.choice).seconds
    assert seconds <= 1.01 * best
    assert seconds == pytest.approx(predict(chain, choice).seconds)
    assert lower_bound(chain) <= min(seconds, best) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_exact_is_the_best_of_all_plans(seed: int) -> None:
    pytest.importorskip("scipy")
    chain = random_chain(random.Random(100 + seed), 4)
    every = torch.tensor(list(itertools.product(*[range(len(s.options)) for s in chain.segments])))
    best = float(Evaluator(chain)(every).min())
    found = solve_exact(chain)
    if not math.isfinite(best):
        assert found.choice is None
        assert found.proven
        return
    assert found.choice is not None
    assert found.proven
    assert predict(chain, found.choice).seconds == pytest.approx(best, rel=1e-5)
    assert search(chain)[1] <= best * 1.01
    assert lower_bound(chain) <= best * (1 + 1e-9)


def test_the_same_chain_gives_the_same_plan() -> None:
    chain = transformer_chain(24, fraction=0.2)
    assert solve(chain).choice == solve(chain).choice


def test_more_memory_is_never_slower() -> None:
    times = [solve(transformer_chain(24, fraction=f)).seconds for f in (0.02, 0.1, 0.3, 0.6, 1.0)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == pytest.approx(transformer_chain(24, fraction=1.0).compute_seconds)


def test_a_budget_below_the_floor_names_the_segment() -> None:
    chain = transformer_chain(4, fraction=0.5)
    heavy = Segment("head", 0.1, 0.1, 9 * chain.segments[0].saved_bytes, chain.segments[0].options)
    with pytest.raises(PlanError, match=r"'head' needs 11\.\d+ GiB"):
        solve(Chain((*chain.segments, heavy), chain.device_bytes))


def test_host_memory_and_disk_that_are_too_small_are_named() -> None:
    away = Option("host", offload_bytes=8, present_bytes=8, host_bytes=8)
    layers = tuple(Segment(str(i), 1.0, 2.0, 8, (away,)) for i in range(4))
    with pytest.raises(PlanError, match=r"host memory .16 bytes. and disk .without a limit."):
        solve(Chain(layers, 100, 1.0, 1.0, host_bytes=16))


def test_another_solver_is_refused() -> None:
    with pytest.raises(ValueError, match='choose "search" or "exact"'):
        solve(transformer_chain(2, fraction=1.0), solver="magic")


def test_exact_is_no_worse_than_search() -> None:
    pytest.importorskip("scipy")
    chain = random_chain(random.Random(5), 24)
    found, exact = solve(chain), solve(chain, solver="exact", seconds=10)
    assert exact.seconds <= found.seconds
    assert exact.gap <= found.gap
    assert exact.bound_seconds == found.bound_seconds


def test_what_fits_is_kept_even_if_others_seem_as_fast() -> None:
    free = Option("disk", offload_bytes=8, present_bytes=8)
    keep = Option("keep", resident_bytes=8, present_bytes=8)
    layers = tuple(Segment(str(i), 1.0, 2.0, 8, (free, keep)) for i in range(4))
    found = solve(Chain(layers, device_bytes=100))
    assert found.choice == (1, 1, 1, 1)


def test_a_plan_near_the_floor_is_found() -> None:
    """What one segment needs least for, another needs most for."""

    def layer(name: str, saved: float, through: float, spared: float) -> Segment:
        disk = Option("disk", offload_bytes=saved, present_bytes=through, spared_bytes=spared)
        again = Option("recompute+disk", offload_bytes=1, present_bytes=2, backward_seconds=1.0)
        return Segment(name, 1.0, 2.0, saved, (disk, again))

    large, small = layer("large", 10, 3, 7), layer("small", 4, 8, 0)
    chain = Chain((large, large, small, small), device_bytes=5, out_rate=100, back_rate=100)
    assert chain.floor()[0] == pytest.approx(4)
    assert solve(chain).choice == (0, 0, 1, 1)
