"""Chains in segments: bits, calls, live bytes."""

import contextlib
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential as torch_sequential
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload.recompute import Schedule
from offload.tensors.live import LiveBytesMeter
from tests.support import assert_identical, assert_same, grads, net, rand

UNIT_BYTES = 8 * 500


def chain(n, segments, levels, session=None):
    """Calls of layers, peak bytes and bytes left, where each of ``n`` layers saves its input."""
    meter = LiveBytesMeter()
    calls = [0] * n

    def layer(i):
        def run(x):
            calls[i] += 1
            with meter:  # within the region: a checkpoint hides what is inside from hooks outside
                return x.sin()

        return run

    x = torch.ones(UNIT_BYTES // 8, dtype=torch.double, requires_grad=True)
    layers = [layer(i) for i in range(n)]
    with session.step() if session else contextlib.nullcontext():
        offload.checkpoint_sequential(layers, segments, x * 1, levels=levels).sum().backward()
    return calls, meter.peak_bytes, meter.alive_bytes


SCHEDULES = {
    "sqrt": lambda n: ("sqrt", 1),
    "auto": lambda n: ("auto", 1),
    "cube root": lambda n: ("sqrt", 2),
    "fourth root": lambda n: ("sqrt", 3),
    "logarithm": lambda n: (2, math.ceil(math.log2(n))),
    "three": lambda n: (3, 1),
}


@pytest.mark.parametrize("n", [4, 5, 7, 16, 31, 64, 100, 256])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_live_bytes_and_evaluations(schedule: str, n: int) -> None:
    """Exactly as many as the schedule says, which test_schedule compares with the theory."""
    segments, levels = SCHEDULES[schedule](n)
    calls, peak_bytes, left_bytes = chain(n, segments, levels)
    expected = Schedule.of(n, segments, levels)
    assert sum(calls) == expected.evaluations()
    assert max(calls) <= levels + 1
    assert peak_bytes == expected.live() * UNIT_BYTES
    assert left_bytes == 0


@pytest.mark.parametrize("n", [4, 16, 64, 256])
def test_memory_follows_the_theory(n: int) -> None:
    """The formulas of Chen et al., without a schedule in between."""
    assert chain(n, "sqrt", 1)[1] == (2 * math.isqrt(n) - 1) * UNIT_BYTES
    assert chain(n, 2, int(math.log2(n)))[1] == (int(math.log2(n)) + 1) * UNIT_BYTES


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_session_changes_no_count(session, levels: int) -> None:
    """As many calls as without one, and no more bytes."""
    calls, peak_bytes, _ = chain(16, 2, levels)
    with_session = chain(16, 2, levels, session)
    assert with_session[0] == calls
    assert with_session[1] <= peak_bytes


@pytest.mark.parametrize("levels", [1, 2, 3])
@pytest.mark.parametrize("segments", [1, 2, 3, 100, "sqrt", "auto"])
def test_same_bits(session, segments, levels: int) -> None:
    """Any schedule, with and without a session, as the chain itself."""

    def step(context, direct=False):
        blocks = nn.Sequential(*(net(i) for i in range(7)), nn.Dropout(0.5))
        x = rand(4, 16, seed=1).requires_grad_()
        torch.manual_seed(3)
        with context():
            if direct:
                out = blocks(x)
            else:
                out = offload.checkpoint_sequential(blocks, segments, x, levels=levels)
            out.pow(2).sum().backward()
        return [out.detach(), x.grad, *grads(blocks), torch.rand(2)]

    assert_same(step, session)
    assert_identical(step(contextlib.nullcontext, direct=True), step(contextlib.nullcontext))


@pytest.mark.parametrize("segments", [1, 2, 4])
def test_flops_are_those_of_torch(segments: int) -> None:
    blocks = nn.Sequential(*(net(i) for i in range(8)))
    counts = []
    for run in (
        lambda x: torch_sequential(blocks, segments, x, use_reentrant=False),
        lambda x: offload.checkpoint_sequential(blocks, segments, x),
    ):
        with FlopCounterMode(display=False) as flops:
            run(rand(4, 16).requires_grad_()).sum().backward()
        counts.append(flops.get_flop_counts())
    assert counts[0] == counts[1]


def test_inputs_of_segments_are_offloaded(session) -> None:
    """Of those that are checkpointed; the last one's activations leave as any others."""
    x = rand(4, 16).requires_grad_()
    layers = [torch.sin] * 9
    with session.step() as step:
        out = offload.checkpoint_sequential(layers, 3, x)
    assert step.report.offloaded_bytes == (2 + 3) * x.nbytes
    out.sum().backward()


def test_several_inputs_and_other_values(session) -> None:
    """The first function gets all inputs, every other one value, which may be a tuple."""

    def step(context, run=offload.checkpoint_sequential):
        x, y = rand(3, 4, seed=1).requires_grad_(), rand(3, 4, seed=2).requires_grad_()
        functions = [
            lambda a, b: (a * b, {"a": a}),
            lambda pair: [pair[0].sin(), pair[1]["a"]],
            lambda pair: pair[0].exp() * pair[1],
            torch.cos,
        ]
        with context():
            run(functions, 4, x, y).sum().backward()
        return [x.grad, y.grad]

    assert_same(step, session)

    def direct(functions, _, *inputs):
        out = functions[0](*inputs)
        for function in functions[1:]:
            out = function(out)
        return out

    plain = contextlib.nullcontext
    assert_identical(step(plain, direct), step(plain))


def test_a_module_twice() -> None:
    """The same module in two places runs in both."""
    layer = nn.Linear(4, 4)
    blocks = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())
    x = rand(2, 4)
    assert torch.equal(offload.checkpoint_sequential(blocks, 2, x), blocks(x))


def test_running_statistics_move_once() -> None:
    """Also of normalisations in a segment of a segment."""
    a, b = (nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(6))) for _ in range(2))
    x = rand(16, 8).requires_grad_()
    a(x).pow(2).sum().backward()
    offload.checkpoint_sequential(b, 2, x, levels=2).pow(2).sum().backward()
    assert_identical(list(a.buffers()), list(b.buffers()))
    assert_identical(grads(a), grads(b))


def test_without_gradients() -> None:
    calls, x = [], torch.ones(2)
    with torch.no_grad():
        offload.checkpoint_sequential([lambda h: calls.append(1) or h + 1] * 5, "sqrt", x, levels=2)
    assert len(calls) == 5


def test_wrong_arguments() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="function 1 is 3, which cannot be called"):
        offload.checkpoint_sequential([torch.sin, 3], 2, x)
    with pytest.raises(ValueError, match="at least one function"):
        offload.checkpoint_sequential([], 2, x)
    with pytest.raises(ValueError, match="segments must be at least 1"):
        offload.checkpoint_sequential([torch.sin], 0, x)


def test_small_budget(open_session, engine: str) -> None:
    """Boundaries that find no room on the disk stay in memory; the step is the same."""
    results = []
    session = open_session(engine=engine, disk_budget=3 * 4096)
    for context in (contextlib.nullcontext, session.step):
        x = rand(1024).requires_grad_()
        with context():
            offload.checkpoint_sequential([torch.sin] * 16, 8, x).sum().backward()
        results.append([x.grad])
    assert_identical(*results)
    assert session.report().kept_bytes["budget"] > 0
