"""Planned sessions on the simulated accelerator: the same bits, no race, within the budget."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import simdev
import torch
from offloading import session_on_sim
from torch import Tensor, nn

from tests.support import assert_identical

STEPS = 11
ROWS, WIDTH = 64, 64


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))


def train(m: nn.Module, device: str, step: Any) -> list[Tensor]:
    """Gradients of every step, on the CPU."""
    m.to(device)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=generator).to(device)
        with step():
            m(x).square().mean().backward()
        found += [p.grad.cpu() for p in m.parameters() if p.grad is not None]
        m.zero_grad()
    return found


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    return train(model(), "cpu", contextlib.nullcontext)


def peak_of_plain() -> tuple[int, int]:
    """Allocator bytes of the model with its gradients, and the most in a plain step."""
    m = model().to("sim")
    x = torch.randn(ROWS, WIDTH).to("sim")
    m(x).square().mean().backward()
    torch.accelerator.synchronize()
    base_bytes = torch.accelerator.memory_allocated()
    m.zero_grad()
    torch.accelerator.reset_peak_memory_stats()
    m(x).square().mean().backward()
    torch.accelerator.synchronize()
    return base_bytes, torch.accelerator.max_memory_allocated()


@pytest.mark.parametrize("share", [0.55, 0.7, 0.9])
def test_same_bits_within_the_budget(scheduler, share, expected, tmp_path: Path) -> None:
    base, plain = peak_of_plain()
    budget = int(base + share * (plain - base))
    peaks: list[int] = []

    @contextlib.contextmanager
    def step() -> Any:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        with session.step():
            yield
        torch.accelerator.synchronize()
        peaks.append(torch.accelerator.max_memory_allocated())

    m = model()
    with (
        session_on_sim(str(tmp_path), device_budget=budget) as session,
        session.apply(m, "auto") as planned,
    ):
        assert_identical(expected, train(m, "sim", step))
        assert planned.plan is not None
        assert set(planned.plan.actions.values()) != {"keep"}
    assert simdev.races() == []
    assert max(peaks[-2:]) <= budget
