"""Sessions that plan: the same bits, within the budget, in real steps of real models."""

import contextlib
import json
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload
from offload.errors import OffloadWarning, PlanError, StateError
from offload.measure import activation_meter
from offload.planning import measure_model
from offload.units import KIB
from offload.workloads import preset
from tests.conftest import Opener
from tests.support import assert_identical, grads, rand

STEPS = 12  # six that measure, and some under plans


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.down(nn.functional.gelu(self.up(self.norm(x))))
        return x + self.drop(h)


class Net(nn.Module):
    """Blocks between an input and an output layer."""

    def __init__(self, depth: int = 5, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.last(x)
        return out


def train(model: nn.Module, step: Any, sizes: list[int]) -> list[Tensor]:
    """Gradients of one step for each size of batch, and the parameters in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    found = []
    for number, size in enumerate(sizes):
        x = rand(size, 8, seed=number)
        with step():
            model(x).square().mean().backward()
        found += [g.clone() for g in grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *(p.detach() for p in model.parameters())]


def floor_and_plain(model: nn.Module, size: int) -> tuple[int, int]:
    """The least budget of ``train``'s step, and what it takes without one."""
    found = measure_model(
        model, lambda: model(rand(size, 8)).square().mean().backward(),
        device="cpu", min_offload_bytes=0,
    )  # fmt: skip
    return found.floor_bytes, found.plain_bytes


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.9, 1.5])
def test_same_bits_within_the_budget(share: float, open_session: Opener) -> None:
    expected = train(Net(), contextlib.nullcontext, [64] * STEPS)
    floor, plain = floor_and_plain(Net(), 64)
    budget = int(floor + share * (plain - floor))
    model = Net()
    session = open_session(device="cpu", device_budget=budget)
    peaks: list[int] = []

    @contextlib.contextmanager
    def step() -> Any:
        with session.step() as done:
            yield
        peaks.append(done.report.peak_live_bytes)

    with session.apply(model, "auto") as planned:
        assert_identical(expected, train(model, step, [64] * STEPS))
        assert planned.plan is not None
        assert planned.plan.peak_bytes <= budget
        if share > 1:
            assert set(planned.plan.actions.values()) == {"keep"}
            assert "everything fits" in planned.plan.notes[0]
        assert "predicted" in str(planned)
    # The first step computes each block again, which needs more than the floor.
    assert max(peaks[share == 0.0 :]) <= budget
    assert type(model.blocks[0]) is Block


@pytest.mark.parametrize("name", ["gpt-tiny", "long-tiny", "vision-tiny"])
@pytest.mark.parametrize("share", [0.1, 0.6])
def test_workloads(name: str, share: float, open_session: Opener) -> None:
    """An independent meter sees no more than the budget, and the gradients are the same."""
    workload = preset(name)
    model = workload.build(seed=0)
    (batch,) = workload.batches(1, seed=0)
    workload.step(model, batch).backward()
    expected = [g.clone() for g in grads(model)]
    found = measure_model(
        model, lambda: workload.step(model, batch).backward(), device="cpu", min_offload_bytes=0
    )
    budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
    plan = found.plan(budget)
    session = open_session(device="cpu", device_budget=budget)
    meter = activation_meter(model, session)
    model = workload.build(seed=0)
    with session.apply(model, plan):
        for _ in range(3):
            model.zero_grad()
            with session.step() as step, meter:
                workload.step(model, batch).backward()
            assert_identical(expected, grads(model))
            assert step.report.peak_live_bytes <= budget
    assert meter.peak_bytes <= budget


def test_a_session_that_closes_takes_its_plan_along(open_session: Opener) -> None:
    model = Net()
    for _ in range(2):  # twice: the second finds the model as it was
        with open_session(device="cpu", device_budget="1MiB") as session:
            planned = session.apply(model, "auto")
            with session.step():
                model(rand(64, 8)).sum().backward()
        assert type(model.blocks[0]) is Block
        planned.remove()  # it has gone already


def test_new_shapes_are_measured_and_planned_by_themselves(open_session: Opener) -> None:
    sizes = [64] * 8 + [32] * 8 + [64] * 2
    expected = train(Net(), contextlib.nullcontext, sizes)
    floor, plain = floor_and_plain(Net(), 64)
    model = Net()
    session = open_session(device="cpu", device_budget=(floor + plain) // 2)
    with session.apply(model, "auto") as planned:
        assert_identical(expected, train(model, session.step, sizes))
        assert planned.auto is not None
        assert [s.plan is not None for s in planned.auto.studies.values()] == [True, True]


def test_accumulation_evaluation_and_errors_inside_steps(open_session: Opener) -> None:
    def run(model: nn.Module, step: Any) -> list[Tensor]:
        torch.manual_seed(3)
        for number in range(10):
            with step():
                for part in range(2):  # two forwards and backwards in one step
                    model(rand(16, 8, seed=10 * number + part)).square().mean().backward()
            with torch.no_grad(), step():
                model(rand(16, 8))
            with contextlib.suppress(ZeroDivisionError), step():
                model(rand(16, 8)).sum()
                raise ZeroDivisionError
        return grads(model)

    expected = run(Net(), contextlib.nullcontext)
    model = Net()
    session = open_session(device="cpu", device_budget=150 * KIB)
    with session.apply(model, "auto") as planned:
        got = run(model, session.step)
        assert planned.plan is not None
    assert_identical(expected, got)


def test_backward_after_the_step(open_session: Opener) -> None:
    model = Net()
    session = open_session(device="cpu", device_budget=300 * KIB)
    with session.apply(model, "auto"):
        for _ in range(3):
            with session.step():
                loss = model(rand(64, 8)).square().mean()
            loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_budget_below_the_floor_is_refused_early(open_session: Opener) -> None:
    model = Net()
    session = open_session(device="cpu", device_budget=20 * KIB)
    refused = pytest.raises(PlanError, match=r"'blocks\.\d' needs .* budget leaves")
    with session.apply(model, "auto"), refused, session.step():
        model(rand(64, 8)).square().mean().backward()
    with session.step():  # the session goes on
        model(rand(64, 8)).square().mean().backward()


def test_what_cannot_be_applied(open_session: Opener) -> None:
    session = open_session(device="cpu")
    with pytest.raises(PlanError, match="needs a budget of device memory"):
        session.apply(Net(), "auto")
    with pytest.raises(ValueError, match='give "auto", a Plan'):
        session.apply(Net(), "best")
    with pytest.raises(TypeError, match='are for "auto"'):
        session.apply(Net(), {"blocks.*": "disk"}, segments=["blocks.0"])
    model = Net()
    in_force = pytest.raises(StateError, match="in force already")
    with session.apply(model, "auto", device_budget=1 << 20), in_force:
        session.apply(model, "auto", device_budget=1 << 20)
    ruled = pytest.raises(StateError, match="ruled already")
    with session.apply(model, {"blocks.0": "disk"}), ruled:
        session.apply(model, "auto", device_budget=1 << 20)


def test_a_budget_of_its_own_is_a_size_like_any_other(open_session: Opener) -> None:
    session, model = open_session(device="cpu"), Net()
    with session.apply(model, "auto", device_budget="1.5MiB") as planned, session.step():
        model(rand(64, 8)).sum().backward()
    assert planned.auto.budgets.device_bytes == 3 << 19
    for budget, error in ("8 parsecs", ValueError), (-1, ValueError), (1.5, TypeError):
        with pytest.raises(error, match="device_budget is"):
            session.apply(model, "auto", device_budget=budget)


def test_plans_are_kept_compared_and_for_one_model(open_session: Opener) -> None:
    model, x = Net(), rand(64, 8)
    found = measure_model(
        model, lambda: model(x).square().mean().backward(), device="cpu", min_offload_bytes=0
    )
    lean = found.plan(found.floor_bytes * 1.1)
    roomy = found.plan(found.plain_bytes * 1.2)
    assert offload.Plan.from_json(lean.to_json()) == lean
    assert lean.diff(lean) == {}
    assert lean.diff(roomy)
    assert set(lean.rules()) == {f"blocks.{i}" for i in range(5)}
    assert lean.bound_seconds <= lean.seconds
    assert "blocks.0" in str(lean)
    with pytest.raises(PlanError, match="is no plan"):
        offload.Plan.from_json("{}")
    earlier = {**lean.to_dict(), "format": lean.to_dict()["format"] - 1}
    with pytest.raises(PlanError, match=r"a plan of format \d+; this reads"):
        offload.Plan.from_json(json.dumps(earlier))
    session = open_session(device="cpu", device_budget=1 << 20)
    with pytest.raises(PlanError, match=r"with a module 'blocks\.0'"):
        session.apply(nn.Linear(2, 2), lean)
    warned = pytest.warns(OffloadWarning, match="was made for inputs")
    with session.apply(model, lean), warned, session.step():
        model(rand(3, 8)).sum().backward()


def test_plan_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        *(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(3)),
    )
    x = rand(2, 3, 16, 16)
    model(x).sum().backward()
    before = [*(g.clone() for g in grads(model)), *(b.clone() for b in model.buffers())]
    state = torch.get_rng_state()
    plan = offload.plan(
        model, lambda: model(x).square().mean().backward(), device_budget="64KiB",
        max_overhead=100.0, device="cpu", min_offload_bytes=0,
    )  # fmt: skip
    assert_identical(before, [*grads(model), *model.buffers()])
    assert torch.equal(state, torch.get_rng_state())
    assert list(plan.actions) == ["1", "2", "3"]


def test_a_plan_has_this_process_s_share_of_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    model, x = Net(), rand(64, 8)
    made = [
        offload.plan(
            model, lambda: model(x).square().mean().backward(), device_budget="1MiB",
            device="cpu", min_offload_bytes=0, disk_budget="4MiB", budget_scope=scope,
        )
        for scope in ("node", "rank")
    ]  # fmt: skip
    assert [plan.budgets.disk_bytes for plan in made] == [1 << 20, 4 << 20]


def test_wanted_segments_and_overheads() -> None:
    model, x = Net(), rand(64, 8)

    def step() -> None:
        model(x).square().mean().backward()

    options: dict[str, Any] = {"device": "cpu", "min_offload_bytes": 0}
    plan = offload.plan(model, step, max_overhead=5.0, segments=["blocks.1", "last"], **options)
    assert list(plan.actions) == ["blocks.1", "last"]
    with pytest.raises(PlanError, match=r"no module 'blocks\.9'"):
        offload.plan(model, step, device_budget=1 << 20, segments=["blocks.9"], **options)
    with pytest.raises(PlanError, match="lies inside segment"):
        names = ["blocks.1", "blocks.1.up"]
        offload.plan(model, step, device_budget=1 << 20, segments=names, **options)
    with pytest.raises(PlanError, match="give device_budget, or max_overhead"):
        offload.plan(model, step)
    with pytest.raises(ValueError, match="max_overhead is -1"):
        offload.plan(model, step, max_overhead=-1)
    with pytest.raises(PlanError, match="could not be measured"):
        offload.plan(model, lambda: None, device_budget=1 << 20, **options)


def test_a_gate_alone_sends_away_what_would_pass_the_budget(open_session: Opener) -> None:
    """A session with a budget and no plan: its policy keeps everything, and may not."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        session = open_session(device="cpu", device_budget=100 * KIB)
    with session.step() as step:
        h = rand(64, 64).requires_grad_()  # 16 KiB each
        for _ in range(20):
            h = h.sin()
        h.sum().backward()
    assert step.report.peak_live_bytes <= 100 * KIB
