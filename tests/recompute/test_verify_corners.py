"""Verification where operations and recomputations are of an odd kind."""

import gc
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    GraphExecGroup,
    set_checkpoint_debug_enabled,
    set_checkpoint_early_stop,
)

import offload
from offload.recompute import Verifier
from offload.recompute.verify import _Watched, current_verifier
from tests.recompute.programs import direct
from tests.support import assert_identical, grads, net, rand


def assert_exact(verifier: Verifier) -> None:
    report = verifier.report()
    assert report.recomputations > 0
    assert not report.drifted, str(report)


def everything(*_, **__):
    return CheckpointPolicy.MUST_CPU_OFFLOAD


def test_statistics_are_put_aside_unseen(open_session) -> None:
    """Copies of running statistics are no operations of the region, for cells neither."""
    results = []
    for run, options in (
        (direct, {}),
        (offload.checkpoint, {}),
        (offload.checkpoint, {"context_fn": offload.selective(everything)}),
    ):
        norm, x = nn.BatchNorm1d(4), rand(8, 4).requires_grad_()

        def function(h, norm=norm):
            h = norm(h.clone())
            return (h.clone() * h).sin()

        with Verifier() as verifier, open_session().step():
            run(function, x, **options).sum().backward()
        results.append([x.grad, *grads(norm), *norm.buffers()])
        if run is not direct:
            assert_exact(verifier)
    assert_identical(results[0], results[1])
    assert_identical(results[0], results[2])


def test_memory_that_was_not_written_yet() -> None:
    """It has no value to compare; what is written into it has."""
    x = rand(300).requires_grad_()

    def function(h: Tensor) -> Tensor:
        out, filled = torch.empty(300), h.detach().new_empty(300).fill_(2)
        torch.empty_like(h)
        torch.sin(h.detach(), out=out)
        return (h * out * filled).sin()

    for _ in range(3):
        with Verifier() as verifier:
            offload.checkpoint(function, x).sum().backward()
        assert_exact(verifier)


def test_lists_of_tensors() -> None:
    x = rand(3).requires_grad_()

    def function(h: Tensor) -> Tensor:
        a, b = torch._foreach_mul([h, h * 2], 2.0)
        torch._foreach_add_([a.detach()], 1.0)
        return (a * b).sin()

    with Verifier() as verifier:
        offload.checkpoint(function, x).sum().backward()
    assert_exact(verifier)


def test_tensors_of_two_tensors(open_session) -> None:
    """A subclass that takes operations apart."""
    x = TwoTensor(rand(3, 3), rand(3, 3, seed=1)).requires_grad_()
    with Verifier() as verifier, open_session().step():
        offload.checkpoint(lambda h: (h @ h).sin().exp(), x).sum().backward()
    assert_exact(verifier)


def test_one_recomputation_for_several_backwards() -> None:
    x = rand(4).requires_grad_()
    with Verifier() as verifier:
        a, b = offload.checkpoint(lambda h: (h.sin().exp(), h.cos().exp()), x)
        with GraphExecGroup():
            a.sum().backward()
            b.sum().backward()
    assert_exact(verifier)
    assert verifier.report().recomputations == 1


def test_recomputation_to_the_end() -> None:
    """Without early stop the last result is compared as well."""
    with set_checkpoint_early_stop(False), Verifier() as verifier:
        offload.checkpoint(net(), rand(4, 16).requires_grad_()).sum().backward()
    assert_exact(verifier)
    assert verifier.report().modules[-1].module == "Sequential.4"


def test_gradients_of_gradients(open_session) -> None:
    x = rand(4).requires_grad_()
    results = []
    for run in (direct, offload.checkpoint):
        with Verifier() as verifier, open_session().step():
            out = run(lambda h: h.sin().exp(), x).sum()
            (g,) = torch.autograd.grad(out, x, create_graph=True)
            results.append(torch.autograd.grad(g.sum(), x)[0])
    assert torch.equal(*results)
    assert_exact(verifier)


def test_error_in_a_recomputation(open_session) -> None:
    """The step ends, its verifier with it, and the next is as good as ever."""
    calls = []

    def function(h: Tensor) -> Tensor:
        calls.append(1)
        h = h.sin()
        if len(calls) == 2:
            raise LookupError
        return h.exp()

    session = open_session(verify_recompute=True)
    x = rand(4).requires_grad_()
    with pytest.raises(LookupError), session.step():
        offload.checkpoint(function, x).sum().backward()
    assert current_verifier() is None
    with session.step():
        offload.checkpoint(torch.sin, x).sum().backward()
    assert not session.recompute_report().drifted


def test_one_inside_another() -> None:
    """The inner one watches."""
    x = rand(3).requires_grad_()
    with Verifier() as outer:
        with Verifier() as inner:
            offload.checkpoint(torch.sin, x).sum().backward()
        offload.checkpoint(torch.sin, x).sum().backward()
    assert (outer.report().regions, inner.report().regions) == (1, 1)


def test_graphs_that_are_dropped_take_their_copies_along() -> None:
    x = rand(1000).requires_grad_()
    for _ in range(3):
        with Verifier() as verifier:
            out = offload.checkpoint(lambda h: h.sin().exp().cos(), x)
        del out
    gc.collect()
    assert not [held for held in gc.get_objects() if type(held) is _Watched]
    assert (verifier.report().regions, verifier.report().recomputations) == (1, 0)


@pytest.fixture
def _debug_of_torch():
    """Its log is no text, and pytest would format it; its first use opens files that stay open."""
    torch.utils.checkpoint.checkpoint(torch.sin, torch.ones(1), use_reentrant=False, debug=True)
    logging.getLogger("LoggingTensor").propagate = True
    yield
    logging.getLogger("LoggingTensor").propagate = True


@pytest.mark.usefixtures("_debug_of_torch")
@pytest.mark.parametrize("for_all", [None, True, False])
def test_debug_is_left_alone(for_all: bool | None) -> None:
    """It takes no contexts, whoever wants it."""
    x = rand(3).requires_grad_()
    for debug in (False, True):
        with Verifier() as verifier, set_checkpoint_debug_enabled(for_all):
            offload.checkpoint(torch.sin, x, debug=debug).sum().backward()
        watched = not (debug if for_all is None else for_all)
        assert verifier.report().regions == int(watched)
