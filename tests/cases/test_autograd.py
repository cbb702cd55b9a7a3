"""The ways it may ask: often, in any order, from inside a backward, for derivatives of it."""

import pytest
import torch
import torch.nn.functional as F

from offload import Session
from offload.tensors import layout
from tests.support import assert_same, grads, ints, net, rand

# torch imports its own deprecated parts for forward mode
jit_is_deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")


class ReadsOften(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx, g):
        a = ctx.saved_tensors[0]
        _junk = [torch.full((32,), 3.0) for _ in range(4)]
        b = ctx.saved_tensors[1]
        again = ctx.saved_tensors[0]
        assert torch.equal(a, again)
        return g * b, g * again


def test_saved_tensors_read_many_times(session: Session) -> None:
    """Each read of ``ctx.saved_tensors`` asks anew and gets the same values."""

    def step(context):
        x = ints(32).requires_grad_()
        y = ints(32, seed=2).requires_grad_()
        with context():
            ReadsOften.apply(x * 2, y * 3).sum().backward()
        return [x.grad, y.grad]

    assert_same(step, session)


def test_double_backward(session: Session) -> None:
    """A gradient of a gradient, with the first backward inside the step."""

    def step(context):
        x = torch.linspace(-1, 1, 12, dtype=torch.double, requires_grad=True)
        w = torch.eye(12, dtype=torch.double, requires_grad=True)
        with context():
            loss = ((x @ w).tanh() ** 2 * x.exp()).sum()
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            (g * torch.arange(12.0)).sum().backward()
        return [x.grad, w.grad]

    assert_same(step, session)


def test_double_backward_after_the_step(session: Session) -> None:
    """The same with the forward alone inside."""

    def step(context):
        x = torch.linspace(-1, 1, 12, dtype=torch.double, requires_grad=True)
        with context():
            loss = ((x * 2).sin() * (x * 3).exp()).sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (g * g).sum().backward()
        return [x.grad]

    assert_same(step, session)


def test_interleaved_micro_batches(session: Session) -> None:
    """Several forwards wait for their backward, first in first out, as pipelines do."""

    def step(context):
        model = net()
        xs = [torch.full((2, 16), float(i + 1)) for i in range(4)]
        losses = {}

        def forward(i):
            with context():
                losses[i] = model(xs[i]).pow(2).sum()

        forward(0)
        forward(1)
        losses[0].backward()
        forward(2)
        losses[1].backward()
        forward(3)
        losses[2].backward()
        losses[3].backward()
        with context():
            together = [model(x).sum() for x in xs]
            for loss in together:
                loss.backward()
        return grads(model)

    assert_same(step, session)


def test_losses_in_any_order(session: Session) -> None:
    """Four losses of one forward, differentiated out of order, and a branch that nobody uses."""

    def step(context):
        x = ints(16, 16).requires_grad_()
        ws = [ints(16, 16, seed=i + 1).requires_grad_() for i in range(4)]
        with context():
            losses = [((x * w) * (x + w)).sum() for w in ws]
            unused = (x * x * x).sum()
            for i in (0, 2, 1, 3):
                losses[i].backward()
            del unused
        return [x.grad] + [w.grad for w in ws]

    assert_same(step, session)


def test_tied_weights_and_accumulation(session: Session) -> None:
    """Embedding and output layer share a weight, and gradients of micro-batches add up."""

    def step(context):
        torch.manual_seed(0)
        embedding = torch.nn.Embedding(20, 8)
        body = torch.nn.Linear(8, 8)
        parameters = [*embedding.parameters(), *body.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for n in range(3):
            for micro_batch in range(4):
                tokens = torch.arange(6) + micro_batch + n
                with context():
                    logits = body(embedding(tokens)).relu() @ embedding.weight.t()
                    F.cross_entropy(logits, tokens).div(4).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in parameters]

    assert_same(step, session)


def test_gradient_hooks_and_partial_graphs(session: Session) -> None:
    """``autograd.grad`` for some inputs prunes the graph: what is pruned is never asked for."""

    def step(context):
        x, y = ints(32).requires_grad_(), ints(32, seed=1).requires_grad_()
        with context():
            h = (x * 2).sin() * (y * 3).cos()
            (gx,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
            (gy,) = torch.autograd.grad(h.sum(), y)
        return [gx, gy]

    assert_same(step, session)


def test_generation_inside_the_step(session: Session) -> None:
    """Inference and no_grad inside a step save nothing and change nothing."""

    def step(context):
        model = net()
        x = torch.ones(2, 16)
        for _ in range(2):
            with context():
                with torch.inference_mode():
                    model(x).clone()
                with torch.no_grad():
                    b = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
                assert not b.requires_grad
                model(x + b.detach()).sum().backward()
            assert torch.is_grad_enabled()
        return [*grads(model), b]

    assert_same(step, session)


def test_step_inside_inference_mode(session: Session) -> None:
    """A step around code that differentiates nothing is empty."""
    with torch.inference_mode(), session.step() as step:
        net()(torch.ones(2, 16))
    assert step.report.offloaded_blocks == 0


def test_backward_inside_inference_mode(session: Session) -> None:
    """Also where the first tensor that comes back does so there."""

    def step(context):
        x = rand(64).requires_grad_()
        with context():
            y = x.sin().sin().sum()
        layout._empty.cache_clear()
        with torch.inference_mode():
            (first,) = torch.autograd.grad(y, x, retain_graph=True)
        return [first.clone(), *torch.autograd.grad(y, x)]

    assert_same(step, session)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_anomaly_mode(session: Session) -> None:
    """torch's own search for bad operations works inside a step."""

    def step(context):
        x = rand(8).requires_grad_()
        with torch.autograd.set_detect_anomaly(True, check_nan=True), context():
            (x * 2).sin().exp().sum().backward()
        return [x.grad]

    assert_same(step, session)


def test_gradcheck(session: Session) -> None:
    """Numeric and analytic derivatives agree, first and second."""
    x = torch.linspace(-1, 1, 6, dtype=torch.double, requires_grad=True)

    def function(x):
        with session.step():
            return (x * 2).sin() * x.exp()

    assert torch.autograd.gradcheck(function, x)
    assert torch.autograd.gradgradcheck(function, x)


@jit_is_deprecated
def test_forward_mode_inside(session: Session) -> None:
    """Forward-mode tangents pass through a step."""
    import torch.autograd.forward_ad as fwd

    def step(context):
        x = torch.linspace(0, 1, 8, dtype=torch.double, requires_grad=True)
        with fwd.dual_level(), context():
            dual = fwd.make_dual(x, torch.ones(8, dtype=torch.double))
            y = (dual * 2).sin()
            tangent = fwd.unpack_dual(y).tangent
            y.sum().backward()
        return [tangent.detach(), x.grad]

    assert_same(step, session)


@jit_is_deprecated
@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev", "hessian"])
def test_function_transforms_refuse_clearly(session: Session, transform: str) -> None:
    """torch refuses saved-tensor hooks under these transforms; the session is usable afterwards."""
    f = torch.func
    x = torch.ones(4)

    def scalar(x):
        return (x * x).sum()

    with session.step(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        if transform == "vjp":
            f.vjp(scalar, x)
        else:
            getattr(f, transform)(scalar)(x)
    with session.step():
        y = torch.ones(4, requires_grad=True)
        scalar(y).backward()
    assert torch.equal(y.grad, torch.full((4,), 2.0))


def test_vmap_and_functional_call_inside(session: Session) -> None:
    """Transforms that torch allows under hooks give the same gradients."""

    def step(context):
        model = net()
        x = rand(5, 16).requires_grad_()
        with context():
            weights = dict(model.named_parameters())
            out = torch.func.functional_call(model, weights, (x,))
            scale = torch.vmap(lambda row: row.sin() * row)(x)
            (out * scale).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)


def test_default_device_and_dispatch_modes(session: Session) -> None:
    """Modes that change how tensors are made or dispatched do not reach into the session."""
    from torch.utils.flop_counter import FlopCounterMode

    def step(context):
        x = rand(8, 8).requires_grad_()
        with context(), torch.device("meta"), FlopCounterMode(display=False):
            ((x * 2) @ x.sin()).sum().backward()
        return [x.grad]

    assert_same(step, session)
