"""Verification: what recomputes exactly is found to, what does not is named, with its numbers."""

import gc
import itertools
import json
import random
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload.errors import OffloadWarning, StateError
from offload.recompute import Verifier
from offload.recompute.drift import difference
from tests.recompute.blocks import MODULES, run
from tests.recompute.layers import ACTIONS, model, train
from tests.support import assert_identical, in_threads, net, rand

INFINITE = float("inf")


class Scaled(nn.Module):
    """Multiplies by a number that it has from elsewhere: the first is the forward's."""

    def __init__(self, numbers: Callable[[], float]) -> None:
        super().__init__()
        self.numbers = numbers

    def forward(self, x: Tensor) -> Tensor:
        return x * self.numbers()


class Chain(nn.Module):
    """Blocks under checkpoints; the one with number ``at`` holds ``odd``."""

    def __init__(self, odd: nn.Module, at: int = 1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), odd if i == at else nn.Identity(), nn.Tanh())
            for i in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = offload.checkpoint(block, x)
        return x.sum()


def alternating() -> Callable[[], float]:
    numbers = itertools.cycle([1.0, 1.5])
    return lambda: next(numbers)


def by_row(report) -> dict[str, tuple[int, int, float, float, str | None]]:
    return {
        m.module: (m.results, m.different, m.max_abs, m.max_rel, m.operation)
        for m in report.modules
        if m.different
    }


def test_exact_numbers() -> None:
    """The module, the operation, and by how much; what follows from it is told apart."""
    torch.manual_seed(0)
    chain = Chain(Scaled(alternating()))
    x = rand(2, 4).requires_grad_()
    with torch.no_grad():
        h = chain.blocks[1][0](chain.blocks[0](x))
    named = r"first in Chain\.blocks\.1\.1 \(aten\.mul\.Tensor\)"
    with pytest.warns(OffloadWarning, match=named), Verifier() as verifier:
        chain(x).backward()
    report = verifier.report()
    rows = by_row(report)
    assert list(rows) == ["Chain.blocks.1.1", "Chain.blocks.1.2"]
    for name, had, got, operation in (
        ("Chain.blocks.1.1", h, h * 1.5, "aten.mul.Tensor"),
        ("Chain.blocks.1.2", h.tanh(), (h * 1.5).tanh(), None),
    ):
        off = (had.double() - got.double()).abs().max().item()
        assert rows[name] == (1, 1, off, off / had.abs().max().item(), operation)
    assert (report.first, report.regions, report.recomputations) == ("Chain.blocks.1.1", 3, 3)
    assert report.drifted
    shown = str(report)
    assert "Chain.blocks.1.1" in shown
    assert "its inputs" in shown
    assert "Chain.blocks.0" not in shown
    told = json.loads(report.to_json())
    assert (told["format"], told["first"]) == (1, "Chain.blocks.1.1")
    assert told["modules"][0]["module"] == "Chain.blocks.0.0"


def test_the_first_in_the_order_of_the_forward() -> None:
    """Backward meets the last first; what is inexact behind another is told to be so itself."""
    chain = Chain(Scaled(alternating()), at=0)
    chain.blocks[2][1] = Scaled(alternating())
    with (
        pytest.warns(OffloadWarning, match="4 of 8 modules"),
        Verifier() as verifier,
    ):
        chain(rand(2, 4).requires_grad_()).backward()
    report = verifier.report()
    assert report.first == "Chain.blocks.0.1"
    starts = [m.module for m in report.modules if m.operation is not None]
    assert starts == ["Chain.blocks.0.1", "Chain.blocks.2.1"]


class OwnGenerator(nn.Module):
    """Noise that no one puts back."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


class Counting(nn.Module):
    """State that moves in forward, and so twice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(), 0.5)
        return x - self.mean


class OtherWay(nn.Module):
    """Other operations when it runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin() if self.calls % 2 else x.cos()


ODD = {
    "own generator": (OwnGenerator, "aten.rand.generator"),
    "python's random": (lambda: Scaled(random.random), "aten.mul.Tensor"),
    "a clock": (lambda: Scaled(itertools.count(1.0).__next__), "aten.mul.Tensor"),
    "state": (Counting, "aten.lerp_.Scalar"),
    "another way": (OtherWay, "aten.cos.default instead of aten.sin.default"),
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("in_step", [False, True])
def test_what_is_not_deterministic_is_named(open_session, odd: str, in_step: bool) -> None:
    make, operation = ODD[odd]
    chain = Chain(make())
    x = rand(2, 4).requires_grad_()
    session = open_session(verify_recompute=in_step)
    verifier = Verifier()
    context = session.step() if in_step else verifier
    with pytest.warns(OffloadWarning, match=r"first in Chain\.blocks\.1\.1"), context:
        chain(x).backward()
    report = session.recompute_report() if in_step else verifier.report()
    assert report.first == "Chain.blocks.1.1"
    row = next(m for m in report.modules if m.module == report.first)
    assert row.operation == operation
    assert row.max_abs == INFINITE if odd == "another way" else 0 < row.max_abs < INFINITE


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("context_fn", [None, "selective"])
def test_no_false_alarm(open_session, name: str, autocast: bool, context_fn: str | None) -> None:
    """Dropout, views, in-place operations, running statistics: equal, and nothing changes."""
    wanted = offload.selective() if context_fn else lambda: [torch.enable_grad() for _ in "12"]
    with FlopCounterMode(display=False) as counter:
        expected = run(MODULES[name], wanted, autocast=autocast)
    with Verifier() as verifier, FlopCounterMode(display=False) as verified:
        got = run(MODULES[name], wanted, open_session().step, autocast=autocast)
    assert_identical(expected, got)
    assert verified.get_total_flops() == counter.get_total_flops()
    report = verifier.report()
    assert report.regions == 4
    assert report.recomputations == (2 if name == "images" else 4)  # one result is not used
    assert sum(m.results for m in report.modules) > 0
    assert not report.drifted, str(report)
    assert report.first is None


@pytest.mark.parametrize("action", ACTIONS)
def test_rules(open_session, action: str) -> None:
    """Under every action: the same bits, nothing differs, the names are those of the model."""
    expected = train(model())
    session = open_session(verify_recompute=True)
    net = model()
    with session.apply(net, {"blocks.*": action}):
        got = train(net, session.step)
    assert_identical(expected, got)
    report = session.recompute_report()
    assert not report.drifted, str(report)
    if action.startswith(("recompute", "selective")):
        assert (report.regions, report.recomputations) == (8, 8)
        names = {m.module for m in report.modules}
        # "down" only makes the last result, for which no recomputation has a use.
        assert {"Model.blocks.0", "Model.blocks.3.attn.drop", "Model.blocks.3.mlp.up"} <= names
    else:
        assert report.regions == 0
        assert "nothing was compared" in str(report)


def test_rule_on_what_is_not_deterministic(open_session) -> None:
    session = open_session(verify_recompute=True)
    net = model()
    net.blocks[2].attn.drop = Scaled(random.random)
    named = pytest.warns(OffloadWarning, match=r"Model\.blocks\.2\.attn\.drop")
    with named, session.apply(net, {"blocks.*": "recompute+disk"}):
        train(net, session.step, steps=1)
    assert session.recompute_report().first == "Model.blocks.2.attn.drop"


@pytest.mark.parametrize("levels", [1, 2])
def test_sequential(levels: int) -> None:
    """Modules that belong to no model are named by their own class, and numbered."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(9)]
    x = rand(2, 4).requires_grad_()
    with Verifier() as verifier:
        offload.checkpoint_sequential(layers, 3, x, levels=levels).sum().backward()
    report = verifier.report()
    assert not report.drifted
    assert {m.module for m in report.modules} >= {"Sequential.0", "Sequential#6.1"}
    layers[1] = nn.Sequential(nn.Linear(4, 4), Scaled(alternating()), nn.Tanh())
    with pytest.warns(OffloadWarning), Verifier() as verifier:
        offload.checkpoint_sequential(layers, 3, x, levels=levels).sum().backward()
    assert verifier.report().first == "Sequential#2.1"


def test_function_without_a_module() -> None:
    number = alternating()

    def function(h: Tensor) -> Tensor:
        return (h * number()).sin()

    with pytest.warns(OffloadWarning), Verifier() as verifier:
        offload.checkpoint(function, rand(3).requires_grad_()).sum().backward()
    assert verifier.report().first.endswith("test_function_without_a_module.<locals>.function")


def test_without_the_random_state() -> None:
    """``preserve_rng_state=False`` is what it says."""
    x = rand(64).requires_grad_()
    with pytest.warns(OffloadWarning), Verifier() as verifier:
        offload.checkpoint(
            lambda h: F.dropout(h, 0.5).sin(), x, preserve_rng_state=False
        ).sum().backward()
    assert verifier.report().drifted


def test_second_backward_nested_and_backward_inside() -> None:
    """Every recomputation is compared; a backward inside a region is not a part of it."""
    layers = net()
    x = rand(4, 16).requires_grad_()

    def inside(h: Tensor) -> Tensor:
        inner = offload.checkpoint(layers, h)
        (g,) = torch.autograd.grad(inner.sum(), h, retain_graph=True)
        return inner.sin() * g.detach()

    with Verifier() as verifier:
        out = offload.checkpoint(inside, x).sum()
        out.backward(retain_graph=True)
        out.backward()
    report = verifier.report()
    assert report.recomputations > report.regions
    assert not report.drifted, str(report)


def test_autocast_that_casts_again() -> None:
    """A weight that was cast before the region is cast again in its recomputation."""
    layer = nn.Linear(16, 16)
    x = rand(4, 16).requires_grad_()
    with Verifier() as verifier, torch.autocast("cpu", torch.bfloat16):
        offload.checkpoint(lambda h: layer(layer(h).sin()), layer(x)).float().sum().backward()
    assert not verifier.report().drifted, str(verifier.report())


def test_backward_after_the_context() -> None:
    """The warning comes with the recomputation."""
    x = rand(3).requires_grad_()
    number = alternating()
    with Verifier() as verifier:
        out = offload.checkpoint(lambda h: (h * number()).sin(), x).sum()
    assert not verifier.report().drifted
    with pytest.warns(OffloadWarning, match="recomputation gave other values"):
        out.backward()
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        with verifier:
            offload.checkpoint(lambda h: (h * number()).sin(), x).sum().backward()


def test_threads() -> None:
    """Each is watched if it says so."""
    verifier = Verifier()
    layers = net()

    def watched() -> None:
        with verifier:
            for seed in range(5):
                offload.checkpoint(layers, rand(4, 16, seed=seed).requires_grad_()).sum().backward()

    def unwatched() -> None:
        for seed in range(5):
            offload.checkpoint(layers, rand(4, 16, seed=seed).requires_grad_()).sum().backward()

    in_threads(watched, unwatched, watched)
    assert (verifier.report().regions, verifier.report().recomputations) == (10, 10)
    assert not verifier.report().drifted


def test_copies_wait_on_the_tiers_and_go(open_session) -> None:
    """In memory there is one result at a time, on the disk they all are, and none is left."""
    session = open_session(verify_recompute=True)
    x = rand(1 << 14).requires_grad_()
    with session.step() as step:
        out = offload.checkpoint(lambda h: h.sin().cos().tanh().exp(), x).sum()
        assert step.report.offloaded_bytes == 5 * x.nbytes  # the input, and four results
        out.backward()
    del out
    gc.collect()
    assert not session.recompute_report().drifted


def test_off_is_off(open_session) -> None:
    session = open_session()
    with pytest.raises(StateError, match="verify_recompute=True"):
        session.recompute_report()
    with pytest.raises(ValueError, match="verify_recompute"):
        open_session(verify_recompute="yes")


def test_difference() -> None:
    nan = float("nan")
    for a, b, expected in (
        ([1.0, nan], [1.0, nan], (0.0, 0.0)),
        ([1.0, nan], [1.0, 2.0], (INFINITE, INFINITE)),
        ([INFINITE, 2.0], [INFINITE, 1.0], (1.0, 0.5)),
        ([0.0], [1.0], (1.0, INFINITE)),
        ([1 << 62], [(1 << 62) + (1 << 20)], (float(1 << 20), 2.0**-42)),
        ([True], [False], (1.0, 1.0)),
        ([3 + 4j], [0j], (5.0, 1.0)),
        ([1.0], [1.0, 1.0], (INFINITE, INFINITE)),
        ([1.0], [1], (INFINITE, INFINITE)),
    ):
        assert difference(torch.tensor(a), torch.tensor(b)) == expected, (a, b)
    assert difference(torch.ones(0), torch.ones(0)) == (0.0, 0.0)
