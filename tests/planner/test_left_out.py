"""Blocks that run, and take no part in the backward."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from offload.planning import measure_model
from tests.conftest import Opener
from tests.planner.test_hard_budgets import STEPS, waves
from tests.support import assert_identical, grads, rand


class CutOff(nn.Module):
    """A block that no gradient leaves."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.block(x.detach())
        return out


@pytest.mark.parametrize("share", [0.3, 0.6])
def test_blocks_that_take_no_part_in_backward(share: float, open_session: Opener) -> None:
    """Their activations are nobody's: they are neither kept nor brought back for others."""
    model, x = nn.Sequential(*waves(4), *map(CutOff, waves(1)), *waves(1)), rand(256, 64)
    names = [str(i) for i in range(len(model))]

    def run() -> None:
        model(x).square().mean().backward()

    run()
    expected = [g.clone() for g in grads(model[4], model[5])]
    found = measure_model(model, run, segments=names, device="cpu", min_offload_bytes=0)
    assert [s.key for s in found.study.profile.segments] == names[4:]
    budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
    session, peaks = open_session(device="cpu", device_budget=budget), []
    with session.apply(model, "auto", segments=names) as planned:
        for _ in range(STEPS):
            model.zero_grad()
            with session.step() as step:
                run()
            assert_identical(expected, grads(model[4], model[5]))
            peaks.append(step.report.peak_live_bytes)
        assert planned.plan is not None
    # Who takes part is known after two steps; the next is measured as leanly as can be.
    assert max(peaks[3:]) <= budget


class Siamese(nn.Module):
    """Runs its blocks twice: with the results of the first time as a target."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = waves()

    def forward(self, x: Tensor) -> Tensor:
        target = self.blocks(x.flip(0)).detach()
        return (self.blocks(x) - target).square().mean()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_blocks_of_which_one_call_takes_no_part(share: float, open_session: Opener) -> None:
    model, x = Siamese(), rand(256, 64)
    model(x).backward()
    expected = [g.clone() for g in grads(model)]
    found = measure_model(model, lambda: model(x).backward(), device="cpu", min_offload_bytes=0)
    keys = [s.key for s in found.study.profile.segments]
    assert keys == [f"blocks.{i}#2" for i in range(4)]
    budget = int(found.floor_bytes + share * (found.plain_bytes - found.floor_bytes))
    session = open_session(device="cpu", device_budget=budget)
    with session.apply(model, "auto") as planned:
        for number in range(STEPS):
            model.zero_grad()
            with session.step() as step:
                model(x).backward()
            assert_identical(expected, grads(model))
            assert number < 4 or step.report.peak_live_bytes <= budget
        assert planned.plan is not None
