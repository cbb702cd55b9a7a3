"""Checkpoints and torch.compile: around, inside, and both."""

import pytest
import torch
from torch import nn

import offload
from tests.support import assert_identical, grads, net, rand

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Model(nn.Module):
    """Blocks under checkpoints, which it calls itself."""

    def __init__(self, wrap):
        super().__init__()
        self.blocks = nn.ModuleList(wrap(nn.Sequential(net(i), nn.BatchNorm1d(16))) for i in (1, 2))

    def forward(self, h):
        for block in self.blocks:
            h = offload.checkpoint(lambda t, block=block: block(t["h"]), {"h": h})
        return h.pow(2).sum()


def compiled(module):
    return torch.compile(module, backend="aot_eager")


def same(module):
    return module


@pytest.mark.parametrize(("outside", "inside"), [(compiled, same), (same, compiled)])
def test_compiled(session, outside, inside) -> None:
    """The same bits as without, over steps that compile and steps that do not any more."""
    results = []
    for wrap, run, context in (
        (inside, outside, lambda: torch.enable_grad()),
        (inside, outside, session.step),
    ):
        model = Model(wrap)
        step = run(model)
        for seed in range(3):
            x = rand(8, 16, seed=seed).requires_grad_()
            with context():
                step(x).backward()
        results.append([x.grad, *grads(model), *model.buffers()])
    assert_identical(*results)
    assert {int(b) for name, b in model.named_buffers() if name.endswith("tracked")} == {3}


def test_chain_of_compiled_blocks(session) -> None:
    """Blocks compiled one by one, in segments."""
    results = []
    for wrap, context in ((same, torch.enable_grad), (compiled, session.step)):
        blocks = [wrap(net(i)) for i in range(6)]
        x = rand(4, 16).requires_grad_()
        with context():
            offload.checkpoint_sequential(blocks, "sqrt", x).pow(2).sum().backward()
        results.append([x.grad, *grads(*blocks)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)  # what compiles sums in an order of its own
