"""Recomputation by rules on the simulated accelerator: the same bits, no race."""

import contextlib
from pathlib import Path

import pytest
import simdev
import torch
from offloading import CONFIGURATIONS, SINGLY, session_on_sim, train
from torch import Tensor, nn

from offload.errors import OffloadWarning
from offload.recompute import Action
from tests.support import assert_identical

STEPS = 3


class Block(nn.Module):
    """Fused attention is not there on this device: products, a norm and a residual will do."""

    def __init__(self, in_place: bool, width: int = 64) -> None:
        super().__init__()
        self.in_place = in_place
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.up(self.norm(x))
        if self.in_place:
            h.add_(1)  # through the _unsafe_view of a product
        return x + self.down(nn.functional.gelu(h))


def model() -> nn.Module:
    """Always the same."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(in_place=i % 2 == 1) for i in range(4)))


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """What the CPU computes, without rules."""
    return train(model(), "cpu", contextlib.nullcontext, STEPS)


@pytest.mark.parametrize("name", SINGLY)
@pytest.mark.parametrize("action", [a.value for a in Action if a is not Action.KEEP])
def test_rules(scheduler, name, action, expected, tmp_path: Path) -> None:
    """Each action, in every scheduler, with all three ways to set up the tiers."""
    m = model()
    with session_on_sim(str(tmp_path), **CONFIGURATIONS[name]) as session:
        with session.apply(m, {"*": action}):
            assert_identical(expected, train(m, "sim", session.step, STEPS))
        report = session.report()
    layer_bytes = 4 * 16 * 64 * 4
    saved = report.offloaded_bytes // layer_bytes - 3  # the loss saves them once in each step
    if action == "selective":
        # Inputs, and the first product where it is not modified.
        assert saved == 3 * 4 + 3 * 2 * 4
    elif action.startswith("recompute"):
        assert saved == (0 if action == "recompute" else 3 * 4)
    if action.endswith("disk"):
        assert report.written_bytes > 0
    assert simdev.races() == []


class Noisy(nn.Module):
    """Draws from a generator of its own, on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator).to(x.device)


@pytest.mark.parametrize("action", ["recompute+disk", "selective"])
def test_verified(scheduler, action: str, expected, tmp_path: Path) -> None:
    """A thread of autograd's compares; what differs is named, without a race."""
    m = model()
    options = {**CONFIGURATIONS[next(iter(CONFIGURATIONS))], "verify_recompute": True}
    with session_on_sim(str(tmp_path), **options) as session:
        with session.apply(m, {"*": action}):
            assert_identical(expected, train(m, "sim", session.step, STEPS))
        report = session.recompute_report()
        assert report.recomputations == 4 * STEPS
        assert not report.drifted, str(report)
        m[2].norm = Noisy()
        with session.apply(m, {"*": action}), pytest.warns(OffloadWarning, match="first in Sequ"):
            train(m, "sim", session.step, 1)
    assert session.recompute_report().first == "Sequential.2.norm"
    assert simdev.races() == []
