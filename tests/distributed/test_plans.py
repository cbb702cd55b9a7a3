"""Plans of several ranks: one for all of them, agreed on between steps."""

import contextlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import offload
from offload.config import Config
from offload.distributed.agreement import ranks_of
from offload.engines import open_engine
from offload.errors import OffloadWarning, PlanError
from offload.units import KIB
from tests.distributed.programs import batch, gradients, local, opened, transformer
from tests.distributed.ranks import Ranks
from tests.distributed.test_tensor_parallel import TENSOR
from tests.doubles import SlowEngine
from tests.support import assert_identical

STEPS = 12  # six that measure, and some under plans
LAYERS, ROWS = 4, 8
SEGMENTS = [str(i) for i in range(LAYERS)]
# Between the floor of these models and what they take with everything kept; each rank for itself
# may make another plan.
BUDGET, FSDP_BUDGET = 500 * KIB, 700 * KIB
Actions = dict[str, str]


def built(kind: str) -> nn.Module:
    model = transformer(LAYERS)
    if kind == "tensor":
        for block in model:
            parallelize_module(block, init_device_mesh("cpu", (2,)), TENSOR)
        return model
    if kind == "fsdp2":
        for block in model:
            fully_shard(block.norm1)  # what is recomputed gathers its parameters again
            fully_shard(block.norm2)
            fully_shard(block)
        return fully_shard(model)
    return model


def steps(model: nn.Module, kind: str, session: Any, rows: Sequence[int]) -> list[Tensor]:
    """Losses and gradients of every step, and the parameters in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for number, of_step in enumerate(rows):
        x = batch(number, same=kind == "tensor", rows=of_step)
        with session.step() if session is not None else contextlib.nullcontext():
            loss = local(model(x)).square().mean()
            loss.backward()
        found += [loss.detach(), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
        del loss
    return [*found, *(local(p).detach().clone() for p in model.parameters())]


@contextlib.contextmanager
def slow_on_rank_1(directory: str, **options: Any) -> Any:
    """A session whose disk is a hundred times slower on one of the ranks."""
    engine = open_engine(Config(disk_dir=directory))
    if dist.get_rank() == 1:
        engine = SlowEngine(engine, bytes_per_s=2e7)
    defaults = {"device_budget": BUDGET, "_engine": engine}
    with opened(directory, **{**defaults, **options}) as session:
        yield session


def auto(directory: str, kind: str, rows: Sequence[Sequence[int]], scope: str) -> Actions:
    """Trained with "auto", on batches of so many rows for each rank; the plan's actions."""
    own = rows[dist.get_rank()]
    expected = steps(built(kind), kind, None, own)
    budget = FSDP_BUDGET if kind == "fsdp2" else BUDGET
    with slow_on_rank_1(directory, plan_scope=scope, device_budget=budget) as session:
        model = built(kind)
        with session.apply(model, "auto", segments=SEGMENTS) as planned:
            assert_identical(expected, steps(model, kind, session, own))
            assert planned.auto is not None
            assert planned.auto.settled or len(set(own)) > 1
            assert planned.plan is not None
            assert len(planned.measured) > 1
            return planned.plan.actions


EQUAL = ([ROWS] * STEPS, [ROWS] * STEPS)
# Grows on one rank, and there alone; each meets shapes that the other has never seen.
UNEQUAL = ([8] * 9 + [4] + [8] * 10, [6] * 9 + [10] * 9 + [2, 10])


@pytest.mark.parametrize(
    ("kind", "rows"), [("tensor", EQUAL), ("fsdp2", EQUAL), ("fsdp2", UNEQUAL)]
)
def test_all_ranks_have_one_plan(
    two: Ranks, tmp_path: Path, kind: str, rows: Sequence[Sequence[int]]
) -> None:
    fast, slow = two.run(auto, str(tmp_path), kind, rows, "group")
    assert fast == slow
    assert set(fast) == set(SEGMENTS)


def test_each_rank_plans_for_itself_if_asked_to(two: Ranks, tmp_path: Path) -> None:
    two.run(auto, str(tmp_path), "alone", EQUAL, "rank")


def refused(directory: str) -> str:
    """A budget that is too small, by what one rank needs."""
    rows = 64 if dist.get_rank() == 1 else ROWS
    with opened(directory, device_budget=BUDGET) as session:
        model = built("fsdp2")
        with session.apply(model, "auto", segments=SEGMENTS):
            steps(model, "fsdp2", session, [rows])
            with pytest.raises(PlanError) as error:
                steps(model, "fsdp2", session, [rows])
    return str(error.value)


def test_a_budget_below_the_floor_of_any_rank_is_refused_on_all(two: Ranks, tmp_path: Path) -> None:
    here, there = two.run(refused, str(tmp_path))
    assert here == there
    assert "needed" in here or "needs" in here


def left_alone(directory: str, how: str) -> Actions:
    """Rank 1 plans for some steps, or not at all; rank 0 goes on, as no collective holds it up."""
    expected = steps(built("alone"), "alone", None, EQUAL[0])
    rank = dist.get_rank()
    with slow_on_rank_1(directory) as session, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = built("alone")
        if rank == 1:
            if how == "leaves":
                with session.apply(model, "auto", segments=SEGMENTS):
                    steps(model, "alone", session, EQUAL[0][:3])
            if how == "stops":
                session.apply(model, "auto", segments=SEGMENTS)
                steps(model, "alone", session, EQUAL[0][:3])
                session.close()
            with contextlib.ExitStack() as stack:
                if how == "never comes":
                    stack.enter_context(session.apply(model, "auto", segments=SEGMENTS))
                dist.barrier()
            return {}
        with session.apply(model, "auto", segments=SEGMENTS) as planned:
            assert planned.auto is not None
            assert planned.auto._group is not None
            if how == "never comes":
                planned.auto._group.patience_seconds = 0.5
            assert_identical(expected, steps(model, "alone", session, EQUAL[0]))
        dist.barrier()
    (warning,) = [w for w in told if issubclass(w.category, OffloadWarning)]
    why = "has not come" if how == "never comes" else "rank 1 plans no more"
    assert why in str(warning.message)
    return {}


@pytest.mark.parametrize("how", ["leaves", "stops", "never comes"])
def test_a_rank_that_plans_no_more_holds_up_nobody(two: Ranks, tmp_path: Path, how: str) -> None:
    two.run(left_alone, str(tmp_path), how)


def planned_ahead(directory: str) -> tuple[str, Actions]:
    model = built("fsdp2")
    x = batch(rows=ROWS)
    with slow_on_rank_1(directory):  # only so that the ranks differ
        made = offload.plan(
            model,
            lambda: model(x).square().mean().backward(),
            device_budget=BUDGET,
            segments=SEGMENTS,
            disk_dir=directory,
            min_offload_bytes=0,
            keep_last_bytes=0,
        )
    assert ranks_of(model) == (0, 1)
    return made.to_json(), made.actions


def test_a_plan_made_ahead_is_one_for_all(two: Ranks, tmp_path: Path) -> None:
    (one, actions), (other, _) = two.run(planned_ahead, str(tmp_path))
    assert one == other
    assert set(actions) == set(SEGMENTS)
