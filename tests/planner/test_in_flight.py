"""Several forwards that wait for their backward, as pipelines have them: planned for, and kept
within the budget.
"""

import contextlib
import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload.errors import OffloadWarning, PlanError
from offload.planner.batch import Evaluator
from offload.planner.exact import solve_exact
from offload.planner.model import Chain
from offload.planner.predict import predict
from offload.planner.solve import check_floor, lower_bound, search
from offload.planning import measure_model
from tests.conftest import Opener
from tests.planner.chains import random_chain
from tests.planner.test_planned import Net
from tests.support import assert_identical, grads, rand

SCHEDULES = {
    "gpipe": ["F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3"],
    "1f1b": ["F0", "F1", "B0", "F2", "B1", "F3", "B2", "B3"],
    "accumulation": ["F0", "B0", "F1", "B1", "F2", "B2", "F3", "B3"],
}
IN_FLIGHT = {"gpipe": 4, "1f1b": 2, "accumulation": 1}


class Wide(nn.Sequential):
    """A block that is wider inside."""

    def __init__(self) -> None:
        super().__init__(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))


def scheduled(model: nn.Module, schedule: str, seed: int = 0) -> None:
    losses: dict[str, Tensor] = {}
    for what, number in (entry for entry in SCHEDULES[schedule]):
        if what == "F":
            losses[number] = model(rand(64, 8, seed=10 * seed + int(number))).square().mean()
        else:
            losses.pop(number).backward()


def train(model: nn.Module, schedule: str, steps: int, step: Any) -> list[Tensor]:
    torch.manual_seed(7)
    found = []
    for number in range(steps):
        model.zero_grad()
        with step():
            scheduled(model, schedule, number)
        found += [g.clone() for g in grads(model)]
    return found


@pytest.mark.parametrize(
    ("schedule", "share"), [("gpipe", 0.15), ("1f1b", 0.6), ("accumulation", 0.15)]
)
def test_same_bits_within_the_budget_of_all(
    schedule: str, share: float, open_session: Opener
) -> None:
    model = Net()
    found = measure_model(
        model, lambda: scheduled(model, schedule), device="cpu", min_offload_bytes=0
    )
    plain = found.plan(1 << 40)
    assert plain.in_flight == IN_FLIGHT[schedule]
    budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
    expected = train(Net(), schedule, 8, contextlib.nullcontext)
    model = Net()
    session = open_session(device="cpu", device_budget=budget)
    peaks: list[int] = []

    @contextlib.contextmanager
    def step() -> Iterator[None]:
        with session.step() as done:
            yield
        peaks.append(done.report.peak_live_bytes)

    with session.apply(model, "auto") as planned:
        assert_identical(expected, train(model, schedule, 8, step))
    plan = planned.plan
    assert plan is not None
    assert plan.in_flight == IN_FLIGHT[schedule]
    assert max(peaks) <= budget
    assert plan.peak_bytes <= budget
    assert set(plan.actions.values()) != {"keep"}
    assert ("at one time" in str(plan)) == (plan.in_flight > 1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_peak_of_all_kept_is_foreseen(schedule: str, open_session: Opener) -> None:
    model = Net()
    found = measure_model(
        model, lambda: scheduled(model, schedule), device="cpu", min_offload_bytes=0
    )
    session = open_session(device="cpu")
    with session.apply(model, found.uniform("keep")), session.step() as step:
        scheduled(model, schedule)
    assert step.report.peak_live_bytes == pytest.approx(found.plain_bytes, rel=0.02)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("newest", [False, True])
def test_results_that_are_held_until_all_have_run(
    newest: bool, count: int, open_session: Opener
) -> None:
    """They are there beside the forwards and backwards of others: all, or the newest."""
    model = nn.Sequential(*(Wide() for _ in range(3)))

    def run() -> None:
        results, losses = [], []
        for number in range(count):
            results.append(model(rand(64, 32, seed=number)))
            losses.append(results[-1].square().mean())
            if newest:
                results = results[-1:]
        torch.stack(losses).sum().backward()

    found = measure_model(model, run, device="cpu", min_offload_bytes=0)
    session = open_session(device="cpu", device_budget=found.floor_bytes)
    with session.apply(model, "auto") as planned:
        for number in range(8):
            with session.step() as step:
                run()
            assert number < 2 or step.report.peak_live_bytes <= found.floor_bytes
        assert planned.plan is not None
        assert planned.plan.in_flight == count


def test_a_forward_whose_graph_is_dropped_waits_for_nothing(open_session: Opener) -> None:
    model = Net()
    session = open_session(device="cpu", device_budget=300 << 10)
    with session.apply(model, "auto") as planned:
        for _ in range(9):
            with session.step():
                model(rand(64, 8)).square().mean()  # nobody asks for its backward
                model(rand(64, 8)).square().mean().backward()
    assert planned.plan is not None
    assert planned.plan.in_flight == 1


def test_a_plan_for_fewer_says_so_and_keeps_the_budget(open_session: Opener) -> None:
    model = Net()
    found = measure_model(
        model, lambda: scheduled(model, "accumulation"), device="cpu", min_offload_bytes=0
    )
    budget = int(found.floor_bytes + 0.3 * (found.plain_bytes - found.floor_bytes))
    plan = found.plan(budget)
    session = open_session(device="cpu", device_budget=budget)
    told = pytest.warns(OffloadWarning, match=r"4 forwards wait .* made for 1")
    with session.apply(model, plan), told, session.step():
        scheduled(model, "gpipe")


def with_others(chain: Chain, in_flight: int, device_bytes: float) -> Chain:
    return Chain(
        chain.segments, device_bytes, chain.out_rate, chain.back_rate,
        host_bytes=in_flight * chain.host_bytes, write_rate=chain.write_rate,
        read_rate=chain.read_rate, in_flight=in_flight,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_search_exact_and_recurrence_count_what_others_keep(seed: int) -> None:
    pytest.importorskip("scipy")
    rng = random.Random(300 + seed)
    one = random_chain(rng, 4)
    chain = with_others(one, rng.choice((2, 3)), rng.uniform(1.0, 3.0) * one.device_bytes)
    every = list(itertools.product(*[range(len(s.options)) for s in chain.segments]))
    times = Evaluator(chain)(torch.tensor(every))
    for k in rng.sample(range(len(every)), 50):
        assert float(times[k]) == pytest.approx(predict(chain, every[k]).seconds, rel=1e-9)
    best = float(times.min())
    exact = solve_exact(chain)
    if best == float("inf"):
        assert exact.choice is None
        return
    assert exact.choice is not None
    assert predict(chain, exact.choice).seconds == pytest.approx(best, rel=1e-5)
    assert best <= search(chain)[1] <= best * 1.01
    assert lower_bound(chain) <= best * (1 + 1e-9)
    chain = with_others(one, chain.in_flight, chain.floor()[0] * 0.99)
    with pytest.raises(PlanError):
        check_floor(chain)
    assert not bool(Evaluator(chain)(torch.tensor(every)).isfinite().any())
