"""Inputs of every shape: recomputed with the same bits, and offloaded once each."""

import functools
from collections import OrderedDict, deque, namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import offload
from offload.recompute.regions import Region
from tests.recompute.programs import assert_no_difference, direct, plain
from tests.support import assert_identical, drain, grads, net, rand

Pair = namedtuple("Pair", "first second")


def tensors():
    """Two that need a gradient and two that need none, all of different sizes."""
    return (
        rand(4, 16, seed=1).requires_grad_(),
        rand(16, seed=2).requires_grad_(),
        rand(4, 1, seed=3) > 0,
        torch.arange(32).view(2, 16),
    )


def mix(a, b, c, d, scale=1.0, extra=None):
    h = (a * b).sin() * scale
    h = torch.where(c, h, h.exp()) * d[0]
    return (h if extra is None else h * extra).cos()


def by_name(a, *, rest, scale=None):
    return mix(a, rest["b"], *rest["more"], scale=scale["value"])


# Name: the function, and how its inputs hold four tensors.
CALLS = {
    "positional": lambda a, b, c, d: (mix, (a, b, c, d), {}),
    "named": lambda a, b, c, d: (mix, (), {"d": d, "c": c, "b": b, "a": a, "scale": 2}),
    "both": lambda a, b, c, d: (mix, (a, b), {"d": d, "c": c, "extra": None}),
    "tuple": lambda a, b, c, d: (lambda t: mix(*t), ((a, b, c, d),), {}),
    "list in list": lambda a, b, c, d: (lambda t: mix(*t[0], *t[1]), ([[a, b], [c, d]],), {}),
    "dict": lambda a, b, c, d: (lambda t: mix(**t), ({"b": b, "a": a, "c": c, "d": d},), {}),
    "containers by name": lambda a, b, c, d: (
        by_name, (a,), {"rest": {"b": b, "more": [c, d]}, "scale": {"value": 3}},
    ),
    "named tuple": lambda a, b, c, d: (
        lambda p, q: mix(p.first, p.second, q.first, q.second), (Pair(a, b), Pair(c, d)), {},
    ),
    "ordered dict": lambda a, b, c, d: (
        lambda t: mix(*t.values()), (OrderedDict(a=a, b=b, c=c, d=d),), {},
    ),
    "deque": lambda a, b, c, d: (lambda t: mix(*t), (deque([a, b, c, d]),), {}),
    "partial": lambda a, b, c, d: (
        functools.partial(functools.partial(mix, a), c=c, d=d, scale=5), (b,), {"scale": 2},
    ),
    "no tensor": lambda a, b, c, d: (
        lambda *rest: mix(a, b, c, d), (1, "text", None, {}, [], (), 2.0, object()), {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_same_bits(session, call: str) -> None:
    def program(run, context):
        a, b, c, d = tensors()
        with context():
            function, args, kwargs = CALLS[call](a * 1, b * 1, c, d)
            run(function, *args, **kwargs).sum().backward()
        return [a.grad, b.grad]

    assert_no_difference(program, session)


@pytest.mark.parametrize("call", [call for call in CALLS if call != "no tensor"])
def test_every_boundary_is_offloaded_once(session, call: str) -> None:
    """Exactly the inputs, to the byte; outside a session nothing of it matters."""
    a, b, c, d = tensors()
    inputs = (a * 1, b * 1, c, d)
    function, args, kwargs = CALLS[call](*inputs)
    with session.step() as step:
        out = offload.checkpoint(function, *args, **kwargs).sum()
    assert step.report.offloaded_blocks == 4
    assert step.report.offloaded_bytes == sum(t.nbytes for t in inputs)
    assert step.report.deduplicated_bytes == 0
    out.backward()
    assert step.report.offloaded_blocks == 4  # the recomputation adds none


def test_torch_offloads_the_positional_ones_only(session) -> None:
    """Why containers are taken apart."""
    a, b, c, d = tensors()
    with session.step() as step:
        out = torch_checkpoint(lambda a, t: mix(a, *t), a * 1, (b, c, d), use_reentrant=False)
    assert step.report.offloaded_bytes == a.nbytes
    out.sum().backward()


def test_tensors_in_containers_are_not_held(session) -> None:
    """Their memory goes while backward is still to come."""
    h = rand(4, 16).requires_grad_() * 1
    holder = {"h": [h]}
    storage = torch.multiprocessing.reductions.StorageWeakRef(h.untyped_storage())
    with session.step():
        out = offload.checkpoint(lambda t: t["h"][0].sin().exp(), holder)
        del h, holder
    drain(session)
    assert storage.expired()
    out.sum().backward()


def test_same_tensor_twice(session) -> None:
    """It is saved once, and is the same object in the recomputation as well."""
    same = []

    def function(a, rest, *, again):
        same.append(a is rest[0] is again)
        return a.sin() * rest[0] * again

    def program(run, context):
        x = rand(4, 16).requires_grad_()
        h = x * 1
        with context():
            run(function, h, [h], again=h).sum().backward()
        return [x.grad]

    x = rand(4, 16).requires_grad_()
    with session.step() as step:
        offload.checkpoint(function, x, [x], again=x).sum().backward()
    assert same == [True, True]
    assert (step.report.offloaded_bytes, step.report.deduplicated_bytes) == (x.nbytes, 0)
    assert_no_difference(program, session)


def test_views_of_one_tensor(session) -> None:
    """Storages move, so views of one share its way; strides stay."""
    strides = []

    def function(views):
        strides.append([v.stride() for v in views])
        return sum(v.sin().sum() for v in views)

    def program(run, context):
        x = rand(6, 16).requires_grad_()
        h = x * 1
        views = [h, h.t(), h[1:3], h[:, ::2], h[0].expand(4, 16)]
        with context() as step:
            run(function, views).backward()
        if step is not None:
            assert step.report.offloaded_bytes == x.nbytes
        return [x.grad]

    assert_no_difference(program, session)
    assert all(found == strides[0] for found in strides)


def test_parameters_are_themselves(session) -> None:
    """An input that is a parameter stays one, stays where it is, and its change is noticed."""
    weight = nn.Parameter(rand(16))
    seen = []

    def function(h, holder):
        seen.append(holder[0])
        return (h * holder[0]).sin()

    x = rand(4, 16).requires_grad_()
    with session.step() as step:
        offload.checkpoint(function, x, [weight]).sum().backward()
    assert seen[0] is seen[1] is weight
    assert step.report.offloaded_bytes == x.nbytes
    with session.step():
        out = offload.checkpoint(function, x, [weight]).sum()
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_function_that_consumes_its_containers(session) -> None:
    """The recomputation gets them as they were; the forward the caller's own."""

    def function(a, holder):
        return mix(a, holder.pop("b"), *holder.pop("more"))

    results = []
    for run in (direct, offload.checkpoint):
        for context in (plain, session.step):
            a, b, c, d = tensors()
            holder = {"b": b, "more": [c, d]}
            with context():
                run(function, a, holder).sum().backward()
            assert holder == {}
            results.append([a.grad, b.grad])
    for result in results[1:]:
        assert_identical(results[0], result)


class Block(nn.Module):
    """With buffers, a method besides forward, and two results."""

    def __init__(self):
        super().__init__()
        self.inner = net(width=16)
        self.register_buffer("table", rand(16, seed=9))

    def forward(self, h, mask=None):
        h = self.inner(h) * self.table
        return h if mask is None else h.masked_fill(mask, 0)

    def both(self, h):
        return self(h), h.exp()


@pytest.mark.parametrize(
    "call",
    [
        lambda run, block, h: run(block, h, mask=h > 1),
        lambda run, block, h: run(block.forward, h, h > 1),
        lambda run, block, h: run(block.__call__, h),
        lambda run, block, h: sum(run(block.both, h)),
        lambda run, block, h: run(lambda b, h: b(h), block, h),
        lambda run, block, h: run(functools.partial(block, mask=h > 0), h),
        lambda run, block, h: run(torch.sin, h),
        lambda run, block, h: run(h.mul, 2).exp(),
    ],
    ids=["module", "forward", "call", "method", "argument", "partial", "operator", "tensor method"],
)
def test_kinds_of_functions(session, call) -> None:
    def program(run, context):
        torch.manual_seed(2)
        block = Block()
        x = rand(4, 16).requires_grad_()
        with context():
            call(run, block, x * 1).sum().backward()
        return [x.grad, *(p.grad for p in block.parameters() if p.grad is not None)]

    assert_no_difference(program, session)


def test_inputs_that_need_no_gradient(session) -> None:
    """The first block of a model; and a region that needs none at all."""

    def program(run, context):
        model = net()
        with context():
            run(model, rand(4, 16)).sum().backward()
            assert not run(torch.sin, {"h": rand(2)}["h"]).requires_grad
        return grads(model)

    assert_no_difference(program, session)


def test_forward_gets_the_callers_own_objects() -> None:
    """Whatever they are, and nothing of them is held after it."""
    tensor, holder = torch.ones(2), [1, {"a": torch.ones(3)}]
    region = Region(lambda a, t: (a, t), (tensor,), {"t": holder})
    boundaries = region.boundaries()
    assert [id(t) for t in boundaries] == [id(tensor), id(holder[1]["a"])]
    first = region(*boundaries)
    assert first[0] is tensor
    assert first[1] is holder
    again = region(torch.zeros(2), torch.zeros(3))
    assert torch.equal(again[0], torch.zeros(2))
    assert torch.equal(again[1][1]["a"], torch.zeros(3))
    assert again[1][0] == 1
    assert region(*boundaries)[1] is not holder


def test_wrong_arguments() -> None:
    x = torch.ones(2)
    with pytest.raises(TypeError, match="cannot be called: pass the function"):
        offload.checkpoint(x, torch.sin)
    with pytest.raises(ValueError, match="non-reentrant kind: leave use_reentrant out"):
        offload.checkpoint(torch.sin, x, use_reentrant=True)
    with pytest.raises(ValueError, match="determinism_check should be one of"):
        offload.checkpoint(torch.sin, x, determinism_check="strict")
    with pytest.raises(ValueError, match="debug=True is incompatible"):
        offload.checkpoint(torch.sin, x, debug=True, context_fn=lambda: (plain(), plain()))
    assert torch.equal(offload.checkpoint(torch.sin, x, use_reentrant=False), x.sin())
