"""How often a region runs: once forward, and once for each backward that needs it."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import GraphExecGroup
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import offload
from tests.recompute.programs import plain, torchs
from tests.support import rand

RUNS = {"torch": torchs, "ours": offload.checkpoint}


@pytest.fixture(params=RUNS)
def run(request):
    """The checkpoint of torch and ours: they must agree."""
    return RUNS[request.param]


class Counted:
    """A function of one input with two results, that counts its calls."""

    def __init__(self, inner=None):
        self.calls = 0
        self.inner = inner

    def __call__(self, h):
        self.calls += 1
        if self.inner is not None:
            h = self.inner(h)
        return h.sin().exp(), h.cos().exp()


def leaf():
    return rand(4, 8).requires_grad_()


def test_one_backward(run, context) -> None:
    function, x = Counted(), leaf()
    with context():
        run(function, x)[0].sum().backward()
    assert function.calls == 2


def test_backward_after_the_step(run, context) -> None:
    function, x = Counted(), leaf()
    with context():
        out = run(function, x)[0].sum()
    out.backward()
    assert function.calls == 2


def test_several_outputs_in_one_backward(run, context) -> None:
    function, x = Counted(), leaf()
    with context():
        a, b = run(function, x)
        (a.sum() + (a * b).sum()).backward()
    assert function.calls == 2


def test_two_backwards_over_a_retained_graph(run, context) -> None:
    """Each recomputes: what was recomputed is not kept from one to the next."""
    function, x = Counted(), leaf()
    with context():
        loss = run(function, x)[0].sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        loss.backward()
    assert function.calls == 3
    assert torch.equal(x.grad, 2 * first)


def test_one_backward_for_each_output(run, context) -> None:
    """Two calls, two recomputations."""
    function, x = Counted(), leaf()
    with context():
        a, b = run(function, x)
        (x_of_a,) = torch.autograd.grad(a.sum(), x, retain_graph=True)
        (x_of_b,) = torch.autograd.grad(b.sum(), x)
    assert function.calls == 3
    assert not torch.equal(x_of_a, x_of_b)


def test_outputs_share_a_recomputation_in_a_group(run, context) -> None:
    function, x = Counted(), leaf()
    with context():
        a, b = run(function, x)
        with GraphExecGroup():
            torch.autograd.grad(a.sum(), x, retain_graph=True)
            torch.autograd.grad(b.sum(), x)
    assert function.calls == 2


def test_partial_backward(run, context) -> None:
    """Regions that a call does not reach are not recomputed by it."""
    first, second, x = Counted(), Counted(), leaf()
    with context():
        h = run(first, x)[0]
        out = run(second, h)[0].sum()
        (of_h,) = torch.autograd.grad(out, h, retain_graph=True)
        assert (first.calls, second.calls) == (1, 2)
        (h * of_h).sum().backward()
    assert (first.calls, second.calls) == (2, 2)


def test_unused_output_of_a_graph(run, context) -> None:
    """A graph that is dropped recomputes nothing."""
    function, x = Counted(), leaf()
    with context():
        run(function, x)
        (x * 2).sum().backward()
    assert function.calls == 1


@pytest.mark.parametrize("depth", [2, 3])
def test_nested(run, context, depth: int) -> None:
    """One call more with each level, and only the outermost boundary is seen from outside."""
    levels = [Counted()]
    for _ in range(depth - 1):
        inner = levels[-1]
        levels.append(Counted(lambda h, inner=inner: run(inner, h)[0]))
    x = leaf()
    with context() as step:
        run(levels[-1], x)[0].sum().backward()
    assert [level.calls for level in levels] == list(range(depth + 1, 1, -1))
    if step is not None:
        assert step.report.offloaded_bytes == x.nbytes


def test_nested_over_a_retained_graph(run, context) -> None:
    inner, x = Counted(), leaf()
    outer = Counted(lambda h: run(inner, h)[0])
    with context():
        loss = run(outer, x)[0].sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert (inner.calls, outer.calls) == (5, 3)


def test_double_backward(run, context) -> None:
    """The graph of the first call's gradient asks once more."""
    function, x = Counted(), leaf()
    with context():
        out = run(function, x)[0].sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        grad.sum().backward()
    assert function.calls == 3


def test_backward_within_a_region(run, context) -> None:
    """A gradient that is part of the forward."""

    def function(h):
        h = h.detach().requires_grad_()
        (grad,) = torch.autograd.grad(h.sin().exp().sum(), h)
        return grad

    def penalty(h, scale):
        return (function(h) * scale).exp()

    x, scale = leaf(), leaf()
    with context():
        run(penalty, x, scale).sum().backward()
    expected = scale.grad.clone()
    scale.grad = None
    penalty(x, scale).sum().backward()
    assert torch.equal(scale.grad, expected)


def test_early_stop(context) -> None:
    """A recomputation ends with the last tensor that is needed, unless told otherwise."""
    ended = []

    def function(h):
        h = h.sin()
        ended.append("saved")
        h = h + 1
        ended.append("end")
        return h

    for early_stop, expected in ((True, ["saved", "end"]), (False, ["saved", "end"] * 2)):
        ended.clear()
        with context():
            offload.checkpoint(function, leaf(), early_stop=early_stop).sum().backward()
        assert ended == expected


def test_contexts(context) -> None:
    """One is around the forward, the other around the recomputation; also as a step's place."""
    entered = []

    @contextlib.contextmanager
    def note(word):
        entered.append(word)
        yield

    with context():
        out = offload.checkpoint(
            torch.sin, leaf(), context_fn=lambda: (note("forward"), note("again"))
        )
        assert entered == ["forward"]
        out.sum().backward()
    assert entered == ["forward", "again"]


def test_offload_instead_of_recompute(session) -> None:
    """A step as the forward's context takes what the region saves."""
    function, x = Counted(), leaf()
    results = offload.checkpoint(function, x, context_fn=lambda: (session.step(), plain()))
    results[0].sum().backward()
    assert function.calls == 1
    assert session.report().offloaded_blocks == 3  # the input and two results of exp


@pytest.mark.parametrize("reentrant", [False, True])
def test_models_that_call_torchs_checkpoint(session, reentrant: bool) -> None:
    """Exactly the boundaries leave, with backward in the step or after it."""
    functions = [Counted() for _ in range(3)]
    x = leaf()
    for within in (True, False):
        with session.step() as step:
            h = x
            for function in functions:
                h = torch_checkpoint(function, h, use_reentrant=reentrant)[0]
            out = h.sum()
            if within:
                out.backward()
        if not within:
            out.backward()
        assert step.report.offloaded_bytes == 3 * x.nbytes
    assert [function.calls for function in functions] == [4, 4, 4]


def test_model_that_is_given_our_checkpoint(session) -> None:
    """The way of Hugging Face: options bound, the block with its keyword arguments bound too."""
    from functools import partial

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, h, attention_mask=None, position_embeddings=None):
            cos, sin = position_embeddings
            return self.linear(h).masked_fill(attention_mask, 0) * cos + h.roll(1) * sin

    gradient_checkpointing = partial(
        offload.checkpoint, use_reentrant=False, preserve_rng_state=True
    )
    layers = [Layer() for _ in range(3)]
    x, mask, positions = leaf(), rand(4, 8, seed=1) > 0, (rand(8, seed=2), rand(8, seed=3))
    shared = {"attention_mask": mask, "position_embeddings": positions}
    with session.step() as step:
        h = x
        for layer in layers:
            h = gradient_checkpointing(partial(layer.__call__, **shared), h)
        h.pow(2).sum().backward()
    boundaries = 3 * x.nbytes + mask.nbytes + sum(t.nbytes for t in positions)
    assert step.report.offloaded_bytes == boundaries + x.nbytes  # and what pow saves
    assert step.report.deduplicated_bytes == 2 * (boundaries - 3 * x.nbytes)
