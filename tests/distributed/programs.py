"""What runs inside a rank: models, training with and without a session, and the comparison."""

import contextlib
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import offload
from tests.conftest import assert_empty
from tests.support import assert_identical, scratch_files

WIDTH, HEADS, ROWS, LENGTH, LAYERS = 32, 4, 4, 16, 2


class Run:
    """One run of a program, with a session or without."""

    def __init__(self, session: offload.Session | None = None) -> None:
        self.session = session

    def step(self) -> AbstractContextManager[Any]:
        """A step of the session, if there is one."""
        return self.session.step() if self.session is not None else contextlib.nullcontext()

    def apply(self, model: nn.Module, rules: dict[Any, str]) -> AbstractContextManager[Any]:
        """The session's rules, if there is one."""
        if self.session is None:
            return contextlib.nullcontext()
        return self.session.apply(model, rules)


Program = Callable[[Run], list[Tensor]]


class Attention(nn.Module):
    """Causal attention with separate projections, as tensor parallelism wants them."""

    def __init__(self, heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head_width = WIDTH // heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """Up, GELU, down."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def transformer(layers: int = LAYERS, seed: int = 0) -> nn.Sequential:
    """Blocks with the same parameters on every rank."""
    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(layers)))


def batch(step: int = 0, *, same: bool = False, rows: int = ROWS) -> Tensor:
    """Another batch on every rank, or the ``same`` one."""
    rank = 0 if same else dist.get_rank()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, LENGTH, WIDTH, generator=generator)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradients(*modules: nn.Module) -> list[Tensor]:
    """A copy of this rank's gradients."""
    found = [p.grad for module in modules for p in module.parameters() if p.grad is not None]
    assert found
    return [local(g).clone() for g in found]


def trained(
    model: nn.Module,
    run: Run,
    *,
    steps: int = 2,
    loss: Callable[[Tensor], Tensor] | None = None,
    same_batch: bool = False,
) -> list[Tensor]:
    """Losses and gradients of steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        x = batch(step, same=same_batch).requires_grad_()  # as a reentrant checkpoint wants it
        with run.step():
            out = model(x)
            value = loss(out) if loss is not None else local(out).float().square().mean()
            del out
            value.backward()
        found += [local(value.detach()), *gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@contextlib.contextmanager
def opened(directory: str, **options: Any) -> Iterator[offload.Session]:
    """A session that offloads everything at once. In the end nothing may be left of it."""
    defaults = {"min_offload_bytes": 0, "keep_last_bytes": 0, "disk_dir": directory}
    with offload.Session(**{**defaults, **options}) as session:
        yield session
        gc.collect()
        assert session._hooks.live_blocks == 0, "a graph is still alive"
    assert_empty(session)
    assert os.listdir(directory) == [], "a file was left in the directory"
    assert scratch_files(directory) == [], "a scratch file is still open"


def compared(program: Program, directory: str, **options: Any) -> offload.StepReport:
    """Run ``program`` with no session and with one: the same bits. The report of the second."""
    torch.manual_seed(7)
    expected = program(Run())
    torch.manual_seed(7)
    with opened(directory, **options) as session:
        got = program(Run(session))
        assert_identical(expected, got)
        del got
        return session.report()
