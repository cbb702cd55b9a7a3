"""Modules whose operations are hard to take apart, and a program to run them in."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offload
from tests.support import grads, net, rand

WIDTH = 16


class Attention(nn.Module):
    """Fused attention between projections, as in a transformer, with dropout on either side."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(x), 0.2)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + F.dropout(self.out(h.transpose(1, 2).flatten(2)), 0.2)


class InPlace(nn.Module):
    """Writes to results of products: itself, through a view, and through ``_unsafe_view``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)  # of three dimensions: an _unsafe_view of the product
        h.add_(1).sin_()
        h = self.b(h)
        h.data.mul_(2)  # under no version at all
        h = torch.relu_(self.b(h.tanh()))
        h = self.c(h)
        h[0].mul_(3)
        return h.tanh()


class Images(nn.Module):
    """Convolution, normalisation and rectifier, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 4, 3), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.Conv2d(4, 3, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0).unflatten(1, (-1, 1)).expand(-1, -1, 3, -1, -1)[0]
        return self.layers(x)


class Random(nn.Module):
    """Draws between other draws."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(x.sin(), 0.3)
        h = h * torch.rand_like(h)
        h = F.dropout(h.cos(), 0.3)
        return h * torch.bernoulli(torch.full_like(h, 0.5)) * torch.randn_like(h)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "net": net,
    "attention": Attention,
    "attention with dropout": lambda: Attention(0.2),
    "in place": InPlace,
    "images": Images,
    "random": Random,
}


def run(
    make: Callable[[], nn.Module],
    context_fn: Any = None,
    step: Callable[[], Any] = contextlib.nullcontext,
    checkpoint: Any = offload.checkpoint,
    autocast: bool = False,
    rounds: int = 2,
) -> list[Tensor]:
    """What a module gives and the gradients it gets, in ``rounds`` regions one after the other."""
    torch.manual_seed(3)
    module = make()
    results = []
    x = rand(4, 5, WIDTH, seed=1).requires_grad_()
    with step():
        for _ in range(rounds):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                h = x * 1
                for _ in range(2):
                    if context_fn is None:
                        out = module(h)
                    else:
                        out = checkpoint(module, h, context_fn=context_fn)
                    h = out if out.shape == h.shape else h
            out.float().pow(2).sum().backward()
            results.append(out.detach())
    state = [b.clone() for b in module.buffers()]
    return [*results, x.grad, *grads(module), *state, torch.get_rng_state()]
