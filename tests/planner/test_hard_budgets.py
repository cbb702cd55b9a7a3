"""Hard budgets: no step passes one, whatever is saved twice, wanted later, or held by others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from offload.planner.needs import uniform_choice
from offload.planner.plan import Plan, make_plan
from offload.planner.predict import Walk
from offload.planner.profile import Budgets
from offload.planner.solve import Solution
from offload.planning import NO_LIMIT, Measurement, measure_model
from tests.conftest import Opener
from tests.planner.test_peaks import timed
from tests.support import assert_identical, grads, rand

STEPS = 12


class Wave(nn.Module):
    """A block that saves much, and of which backward wants little at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        for _ in range(5):
            x = x.sin().cos()
        return x


def waves(depth: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Wave() for _ in range(depth)))


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_the_floor_can_be_planned_for(share: float, open_session: Opener) -> None:
    """It lies below what one segment saves, and what the first segment saves is a batch, too."""
    model, x = waves(), rand(256, 64)
    model(x).square().mean().backward()
    expected = [g.clone() for g in grads(model)]
    found = measure_model(
        model, lambda: model(x).square().mean().backward(), device="cpu", min_offload_bytes=0
    )
    segments = found.study.profile.segments
    assert sum(segments[0].before.held.values()) >= x.nbytes
    assert found.floor_bytes < sum(segments[1].saved.values())
    budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
    model = waves()
    session = open_session(device="cpu", device_budget=budget)
    with session.apply(model, "auto") as planned:
        for number in range(STEPS):
            model.zero_grad()
            with session.step() as step:
                model(x).square().mean().backward()
            assert_identical(expected, grads(model))
            assert number == 0 or step.report.peak_live_bytes <= budget
        assert planned.plan is not None
        assert planned.plan.peak_bytes <= budget


def test_a_batch_counts_where_it_is_all_that_a_segment_saves() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    x = rand(256, 64)
    found = measure_model(
        model, lambda: model(x).sum().backward(), device="cpu", min_offload_bytes=0,
        segments=["0", "1", "2", "3"],
    )  # fmt: skip
    assert list(found.study.profile.segments[0].before.held.values()) == [x.nbytes]


class Shift(nn.Module):
    """A block, none of whose operations saves its input."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.kind = kind

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.up(x.sin() if self.kind == "gap" else x + 1).tanh()
        out = self.down(h)
        if self.kind in ("read", "gap"):
            out = out.tanh()  # which saves its result
        return out, h[:, : x.shape[1]]


class Odd(nn.Module):
    """Blocks in the hands of somebody who holds on to things.

    Args:
        kind: ``"last"``: to nothing. ``"skip"``: to the first result, for the last block.
            ``"every"``: to all of them, for the loss. ``"read"``: to nothing, but each block saves
            its result, and the next only reads it. ``"gap"``: the same, but the next saves it, too,
            and something else is saved in between. ``"view"``: to a part of what a block saved,
            while the next runs. ``"kept"``: to all results until backward is over. ``"late"``: the
            same, until the loss is computed.
    """

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.ModuleList(Shift(width, kind) for _ in range(5))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        kind, results, parts = self.kind, [], []
        for i, block in enumerate(self.blocks):
            skip = results[0] if kind == "skip" and i == 4 else 1
            x, part = block(x * skip if kind == "skip" else x)
            side = part if kind == "view" else None
            parts.append((2 * x).exp().sum() if kind == "gap" else x.new_zeros(()))
            if kind in ("skip", "every", "kept", "late"):
                results.append(x)
            del part
        del side
        wanted = results if kind == "every" else [x]
        loss = torch.stack([r.square().mean() for r in wanted] + parts).sum()
        return loss, results if kind == "kept" else []


KINDS = ["last", "skip", "every", "read", "gap", "view", "kept", "late"]


def run(model: nn.Module, x: Tensor) -> None:
    loss, _kept = model(x)
    loss.backward()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [256, 200])  # 200: of which no storage fills its pages
@pytest.mark.parametrize("share", [0.0, 0.2, 0.5])
def test_plans(share: float, rows: int, kind: str, open_session: Opener) -> None:
    model, x = Odd(16, kind), rand(rows, 16)
    run(model, x)
    expected = [g.clone() for g in grads(model)]
    found = measure_model(model, lambda: run(model, x), device="cpu", min_offload_bytes=0)
    budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
    plan = timed(found, link=0.5 if rows == 256 else 4.0).plan(budget)
    model = Odd(16, kind)
    session = open_session(device="cpu", device_budget=budget)
    with session.apply(model, plan):
        for _ in range(3):
            model.zero_grad()
            with session.step() as step:
                run(model, x)
            assert_identical(expected, grads(model))
            assert step.report.peak_live_bytes <= budget


@pytest.mark.parametrize("kind", KINDS)
def test_while_measuring(kind: str, open_session: Opener) -> None:
    """What can be known of a pass before it runs is known."""
    model, x = Odd(16, kind), rand(200, 16)
    found = measure_model(model, lambda: run(model, x), device="cpu", min_offload_bytes=0)
    for share in (0.05, 0.3):
        budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
        session = open_session(device="cpu", device_budget=budget)
        with session.apply(model, "auto") as planned:
            peaks = []
            for _ in range(8):
                with session.step() as step:
                    run(model, x)
                peaks.append(step.report.peak_live_bytes)
            assert planned.plan is not None
        assert max(peaks[1:]) <= budget
        session.close()


def test_parts_of_what_the_caller_keeps(open_session: Opener) -> None:
    """The hooks and the planner agree on which storages make up a part."""
    model, x = Odd(16, "kept"), rand(256, 16)
    found = measure_model(model, lambda: run(model, x), device="cpu", min_offload_bytes=0)
    uniform = found.uniform("disk:50%")
    plan = found.plan(uniform.peak_bytes + (64 << 10))
    rows = [u if not u.is_gap else p for u, p in zip(uniform.rows, plan.rows, strict=True)]
    session = open_session(device="cpu", device_budget=1 << 30)
    with session.apply(model, replace(plan, rows=tuple(rows))):
        for _ in range(2):
            with session.step() as step:
                run(model, x)
    assert 0 < step.report.offloaded_bytes < sum(r.saved_bytes for r in rows)
    assert step.report.peak_live_bytes <= uniform.peak_bytes


def test_results_of_the_step_before(open_session: Opener) -> None:
    """They die when the next ones take their names, which is after the next forward."""
    model, x = Odd(16, "kept"), rand(256, 16)
    found = measure_model(model, lambda: run(model, x), device="cpu", min_offload_bytes=0)
    budget = (found.floor_bytes + found.plain_bytes) // 2
    session, peaks = open_session(device="cpu", device_budget=budget), []
    with session.apply(model, "auto") as planned:
        for _ in range(8):
            with session.step() as step:
                loss, results = model(x)
                loss.backward()
            peaks.append(step.report.peak_live_bytes)
        assert planned.plan is not None
    assert len(results) == 5
    assert max(peaks) <= budget


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize("is_given", [False, True])
def test_batches_that_stay_in_memory(is_given: bool, dropped: bool, open_session: Opener) -> None:
    """They are the caller's before and after: each counts while a step has saved it, also for a
    forward that nobody asks backward of.
    """
    model, batches = waves(), [rand(256, 64) for _ in range(2 * STEPS)]

    def run_on(batch: Tensor, other: Tensor) -> None:
        if dropped:
            model(other)
        model(batch).sum().backward()

    found = measure_model(model, lambda: run_on(*batches[:2]), device="cpu", min_offload_bytes=0)
    budget = int(0.4 * found.floor_bytes + 0.6 * found.plain_bytes)
    session = open_session(device="cpu", device_budget=budget)
    with session.apply(model, found.plan(budget) if is_given else "auto"):
        for number in range(STEPS):
            with session.step() as step:
                run_on(batches[2 * number], batches[2 * number + 1])
            assert step.report.peak_live_bytes <= budget
            assert not step.report.warnings


def test_accumulation_over_batches(open_session: Opener) -> None:
    """The floor is the same for several of them as for one."""
    model, batches = waves(), [rand(256, 64) for _ in range(4)]

    def run_on(batches: list[Tensor]) -> None:
        for batch in batches:
            model(batch).sum().backward()

    floors = [
        measure_model(
            model, lambda n=n: run_on(batches[:n]), device="cpu", min_offload_bytes=0
        ).floor_bytes
        for n in (1, 4)
    ]  # fmt: skip
    assert floors[0] == floors[1]
    session = open_session(device="cpu", device_budget=floors[0])
    with session.apply(model, "auto"):
        for number in range(STEPS):
            with session.step() as step:
                run_on(batches)
            assert number == 0 or step.report.peak_live_bytes <= floors[0]


class Deep(nn.Module):
    """As many blocks as it is told."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))  # noqa: E731
        self.blocks = nn.ModuleList(layer() for _ in range(4))
        self.depth = 4

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = x + block(x)
        return x.square().mean()


@pytest.mark.parametrize("depths", [[2, 4, 4, 4, 2, 4, 4, 4], [4, 4, 4, 4, 4, 4, 2, 4]])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_depths_that_change_from_step_to_step(
    share: float, depths: list[int], open_session: Opener
) -> None:
    model, x = Deep(), rand(256, 16)
    found = measure_model(model, lambda: model(x).backward(), device="cpu", min_offload_bytes=0)
    budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
    model.depth = 2
    short = measure_model(model, lambda: model(x).backward(), device="cpu", min_offload_bytes=0)
    plans = ["auto", found.plan(budget), short.plan(budget)]
    for plan in plans:
        session = open_session(device="cpu", device_budget=budget)
        with session.apply(model, plan):
            for model.depth in depths:
                model.zero_grad()
                model(x).backward()
                expected = [g.clone() for g in grads(*model.blocks[: model.depth])]
                model.zero_grad()
                with session.step() as step:
                    model(x).backward()
                assert_identical(expected, grads(*model.blocks[: model.depth]))
        assert plan != plans[1] or step.report.peak_live_bytes <= budget
        session.close()


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_are_collected_do_not_leave(kind: str, open_session: Opener) -> None:
    """Not by a selective region either, before one was measured."""
    model, x = Odd(16, kind), rand(200, 16)
    session = open_session(device="cpu")
    with session.apply(model, "auto", device_budget=NO_LIMIT) as planned:
        with session.step():
            run(model, x)
        assert planned.auto is not None and planned.auto.newest is not None
        chain = planned.auto.newest.profile.chain(Budgets(NO_LIMIT))
    stays = [
        o.resident_bytes for s in chain.segments for o in s.options if o.action == "selective+disk"
    ]
    # The others' results are of no expensive operation, or nobody has them any more.
    collected = x.nbytes if kind in ("skip", "every", "kept", "late") else 0
    assert stays[:3] == [collected] * 3


def claimed(found: Measurement, choice: tuple[int, ...]) -> tuple[Plan, int]:
    """The plan of these options, and the least budget that it says it keeps."""
    chain = found.chain(NO_LIMIT)
    walk = Walk(chain, choice)
    budget = int(chain.device_bytes - min(*walk.forward_rooms, *walk.backward_rooms)) + 1
    budgets = replace(found.budgets, device_bytes=budget)
    solution = Solution(choice, 0.0, 0.0, 0.0, "given")
    chain = replace(chain, device_bytes=budget)
    return make_plan(found.study.profile, budgets, chain, solution, found.signature), budget


@pytest.mark.parametrize(
    "action", ["disk", "recompute+disk", "selective+disk", "recompute", "selective+keep"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_action_for_all(kind: str, action: str, open_session: Opener) -> None:
    """Also those that a search may choose seldom need no more than they say."""
    model, x = Odd(16, kind), rand(200, 16)
    found = measure_model(model, lambda: run(model, x), device="cpu", min_offload_bytes=0)
    plan, budget = claimed(found, uniform_choice(found.chain(NO_LIMIT), action))
    session = open_session(device="cpu", device_budget=budget)
    with session.apply(model, plan):
        for _ in range(3):
            with session.step() as step:
                run(model, x)
            assert step.report.peak_live_bytes <= budget
