"""Rules on compiled modules: their code stays whole and inside, and the bits are the same."""

import contextlib
import shutil

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from offload.errors import OffloadWarning
from offload.recompute.rules import Action
from tests.support import assert_identical, grads, rand

ACTIONS = [action.value for action in Action]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Block(nn.Module):
    """With statistics that run and numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.norm, self.drop = nn.BatchNorm1d(16), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Model(nn.Module):
    """More blocks than a compiler compiles one function for different classes."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(10))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def wrapped(model: Model, backend) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend=backend)


def in_place(model: Model, backend) -> None:
    for block in model.blocks:
        block.compile(backend=backend)


def train(way, action: str | None, session, backend: str = "aot_eager", late: bool = False):
    """Results of two steps, and how many functions were compiled."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = Model()
    counter = CompileCounterWithBackend(backend)
    if not late:
        way(model, counter)
    rules = contextlib.nullcontext()
    if action is not None:
        rules = session.apply(model, {"blocks.*": action})
    results = []
    with rules:
        if late:
            way(model, counter)
        for seed in range(2):
            x = rand(4, 16, seed=seed).requires_grad_()
            with session.step() if action is not None else contextlib.nullcontext():
                loss = model(x)
                loss.backward()
            results += [loss.detach(), x.grad]
    assert not counters["graph_break"]
    return [*results, *grads(model), *model.buffers(), torch.get_rng_state()], counter.frame_count


@pytest.mark.parametrize("way", [wrapped, in_place])
def test_compiled_blocks_under_rules(open_session, way) -> None:
    """One function is compiled for all blocks, whatever the rule: no break, no compiling again."""
    session = open_session()
    expected, compiled = train(way, None, session)
    assert compiled == 1
    for action in ACTIONS:
        got, compiled = train(way, action, session)
        assert_identical(expected, got)
        assert compiled == 1, action


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_inductor(open_session, monkeypatch) -> None:
    """Its kernels recompute as they computed, random numbers of its own included."""
    import torch._inductor.config as config

    monkeypatch.setattr(config, "compile_threads", 1)  # no pool of processes that stays
    expected, _ = train(in_place, None, open_session(), backend="inductor")
    got, compiled = train(in_place, "recompute+disk", open_session(), backend="inductor")
    assert_identical(expected, got)
    assert compiled == 1


def test_compiled_after_the_rules(open_session) -> None:
    """In place, the rule goes around what is compiled; the class is the old one in the end."""
    session = open_session()
    expected, _ = train(in_place, None, session)
    got, compiled = train(in_place, "recompute", session, late=True)
    assert_identical(expected, got)
    assert compiled == 1
    model = Model()
    with session.apply(model, {"blocks.0": "recompute"}):
        model.blocks[0].compile(backend="eager")
        assert type(model.blocks[0]) is not Block
    assert type(model.blocks[0]) is Block


@pytest.mark.parametrize("action", ["disk", "recompute", "selective"])
def test_rule_inside_a_compiled_model(open_session, action: str) -> None:
    """It says that it breaks the graph; the bits are those of the eager model."""
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Model()
        session = open_session()
        if compiled:
            model = torch.compile(model, backend="aot_eager")
            with pytest.warns(OffloadWarning, match="and 9 more that are ruled are inside a comp"):
                rules = session.apply(model, {"_orig_mod.blocks.*": action})
        else:
            rules = session.apply(model, {"blocks.*": action})
        x = rand(4, 16).requires_grad_()
        with rules, session.step():
            model(x).backward()
        results.append([x.grad, *grads(model), *model.buffers()])
    assert_identical(*results)


def test_rule_on_a_compiled_model_itself(open_session) -> None:
    """Around it is not inside it."""
    session = open_session()
    counter = CompileCounterWithBackend("aot_eager")
    model = torch.compile(Model(), backend=counter)
    x = rand(4, 16).requires_grad_()
    with session.apply(model, {"": "recompute+disk"}), session.step() as step:
        model(x).backward()
    assert counter.frame_count == 1
    assert step.report.offloaded_bytes == x.nbytes
