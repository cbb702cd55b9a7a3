"""A transformer trains on the device as it does on the CPU, bit by bit."""

import functools
from dataclasses import dataclass

import pytest
import simdev
import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, CLASSES = 64, 4, 10
BATCH, LENGTH = 8, 16


class Block(nn.Module):
    """LayerNorm, causal attention and a GELU MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attention.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


@dataclass(frozen=True)
class Trained:
    losses: list[float]
    gradients: list[Tensor]
    parameters: list[Tensor]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def train(device: str, optimizer=sgd, *, is_bfloat16: bool = False, steps: int = 3) -> Trained:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, CLASSES)).to(device)
    step = optimizer(model.parameters())
    data = torch.Generator().manual_seed(1)
    losses, gradients = [], []
    for _ in range(steps):
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=data).to(device)
        target = torch.randint(CLASSES, (BATCH * LENGTH,), generator=data).to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=is_bfloat16):
            loss = F.cross_entropy(model(x).flatten(0, 1).float(), target)
        step.zero_grad()
        loss.backward()
        gradients += [parameter.grad.cpu() for parameter in model.parameters()]
        step.step()
        losses.append(loss.item())
    return Trained(losses, gradients, [p.detach().cpu() for p in model.parameters()])


on_cpu = functools.cache(functools.partial(train, "cpu"))


def assert_identical(got: Trained, expected: Trained) -> None:
    assert got.losses == expected.losses
    for a, b in zip(
        got.gradients + got.parameters, expected.gradients + expected.parameters, strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_bits_are_those_of_the_cpu(optimizer, scheduler):
    assert_identical(train("sim", optimizer), on_cpu(optimizer))
    stats = simdev.stats()
    assert stats.sync_operators == {}
    assert stats.syncs.operator == 0


@pytest.mark.parametrize("seed", range(5))
def test_bits_do_not_depend_on_the_order(seed):
    simdev.configure(scheduler=simdev.Scheduler.RANDOM, seed=seed)
    assert_identical(train("sim"), on_cpu(sgd))


def test_bits_do_not_depend_on_whether_operators_are_asynchronous(scheduler):
    simdev.configure(async_operators=False)
    assert_identical(train("sim"), on_cpu(sgd))
    assert simdev.stats().async_operators == 0


def test_autocast(scheduler):
    assert_identical(train("sim", is_bfloat16=True), on_cpu(is_bfloat16=True))


def test_autocast_computes_in_bfloat16():
    model = nn.Linear(4, 4).to("sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        assert model(torch.ones(2, 4, device="sim")).dtype == torch.bfloat16


def test_memory_does_not_grow_from_step_to_step(scheduler):
    peaks = []
    for steps in (2, 4):
        torch.accelerator.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        train("sim", steps=steps)
        peaks.append(torch.accelerator.max_memory_allocated() - before)
    assert peaks[0] == peaks[1]


def test_virtual_time_does_not_depend_on_the_scheduler():
    times_ns = set()
    for scheduler in simdev.Scheduler:
        simdev.reset()
        simdev.configure(scheduler=scheduler)
        train("sim", steps=1)
        times_ns.add(simdev.virtual_time_ns())
    assert len(times_ns) == 1
