"""A small transformer to apply rules to."""

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from offload.recompute import Action
from tests.support import grads, rand

WIDTH = 16
ACTIONS = [action.value for action in Action]


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, debug: bool = False, scale: Tensor | None = None) -> Tensor:
        """Project."""
        h = self.down(F.gelu(self.up(x)))
        return h if scale is None else h * scale


class Attention(nn.Module):
    """One head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        h: Tensor = self.drop(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return h


class Block(nn.Module):
    """A transformer layer, whose normalisation has statistics that run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.attn = Attention()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        h: Tensor = x + self.mlp(x, debug=True, scale=x.sigmoid())
        return h


class Model(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        h: Tensor = self.head(x)
        return h


def model() -> Model:
    """Always the same."""
    torch.manual_seed(0)
    return Model()


def train(model: nn.Module, context: Any = contextlib.nullcontext, steps: int = 2) -> list[Tensor]:
    """Losses, gradients, state and random state after some steps."""
    torch.manual_seed(1)
    x = rand(4, 5, WIDTH, seed=2).requires_grad_()
    losses = []
    for _ in range(steps):
        with context():
            loss = model(x).pow(2).sum()
            loss.backward()
        losses.append(loss.detach())
    return [*losses, x.grad, *grads(model), *model.buffers(), torch.get_rng_state()]
