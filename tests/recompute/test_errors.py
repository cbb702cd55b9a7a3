"""Errors in a region, and changes that make its recomputation impossible: a clean session after."""

import contextlib
import gc
import logging

import pytest
import torch
from torch.utils.checkpoint import CheckpointError, set_checkpoint_debug_enabled
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import offload
from tests.recompute.programs import plain
from tests.support import assert_identical, grads, net, rand


def a_step_works(context) -> None:
    """With the same bits, as if nothing had been."""

    def step(around):
        model = net()
        x = rand(4, 16).requires_grad_()
        with around():
            offload.checkpoint(model, x).sum().backward()
        return [x.grad, *grads(model)]

    assert_identical(step(plain), step(context))


def assert_nothing_held(context) -> None:
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    session = getattr(context, "__self__", None)
    if session is not None:
        assert session._hooks.live_blocks == 0


@pytest.mark.parametrize("failing_call", [1, 2])
def test_error(context, failing_call: int) -> None:
    """In the forward or the recomputation: the user's own error, and a clean session."""
    calls = []

    def function(holder):
        calls.append(1)
        h = holder["h"].sin()
        if len(calls) == failing_call:
            raise LookupError("mine")
        return h.exp()

    x = rand(64).requires_grad_()
    state = torch.get_rng_state()
    with pytest.raises(LookupError, match="mine"), context():
        offload.checkpoint(function, {"h": x * 1}).sum().backward()
    assert x.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    assert_nothing_held(context)
    a_step_works(context)


def test_backward_again_after_an_error_in_it(context) -> None:
    """The graph is whole: what failed once can be asked for again."""
    calls = []

    def function(h):
        calls.append(1)
        if len(calls) == 2:
            raise LookupError
        return h.sin().exp()

    x = rand(64).requires_grad_()
    with context():
        out = offload.checkpoint(function, x).sum()
        with pytest.raises(LookupError):
            out.backward()
        out.backward()
    y = x.detach().requires_grad_()
    y.sin().exp().sum().backward()
    assert torch.equal(x.grad, y.grad)


@pytest.fixture
def _debug_of_torch():
    """What is particular about ``debug=True``.

    Its log is no text, and pytest would format it: it listens to those loggers that keep to
    themselves when a phase of a test begins. And its first use opens files that stay open.
    """
    torch_checkpoint(torch.sin, torch.ones(1), use_reentrant=False, debug=True)
    logging.getLogger("LoggingTensor").propagate = True
    yield
    logging.getLogger("LoggingTensor").propagate = True


@pytest.mark.usefixtures("_debug_of_torch")
def test_other_tensors_in_recomputation(context) -> None:
    """torch's error, which says what differs; with ``debug`` also which operations ran."""
    calls = []

    def function(h):
        calls.append(1)
        return h.sin() if len(calls) % 2 else h[:2].sin()

    x = rand(4).requires_grad_()
    for options, message in (
        ({}, "different metadata"),
        ({"debug": True}, "Operations executed during recomputation"),
    ):
        with pytest.raises(CheckpointError, match=message), context():
            offload.checkpoint(function, x, **options).sum().backward()
        a_step_works(context)


@pytest.mark.usefixtures("_debug_of_torch")
def test_debug_does_not_see_our_doing(context) -> None:
    """No false alarm, and torch's switch for all checkpoints works."""
    x = rand(4).requires_grad_()
    with set_checkpoint_debug_enabled(True), context():
        offload.checkpoint(lambda t: t[0].sin().exp(), [x]).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("inside", [True, False])
def test_input_changed_in_place(context, inside: bool) -> None:
    """By the region itself or after it: the recomputation would start from something else."""
    x = rand(64).requires_grad_()
    h = x * 1

    def function(holder):
        (h,) = holder
        return (h.mul_(2) if inside else h).sin().exp()

    with context():
        out = offload.checkpoint(function, (h,)).sum()
        if not inside:
            h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    del out
    a_step_works(context)


def test_leaving_the_step_by_an_error_inside_a_region(context) -> None:
    with pytest.raises(ZeroDivisionError), context():
        offload.checkpoint(lambda h: 1 // 0, rand(4).requires_grad_())
    with contextlib.suppress(KeyError), context():
        offload.checkpoint(lambda h: {}["none"], rand(4).requires_grad_())
    assert_nothing_held(context)
    a_step_works(context)
