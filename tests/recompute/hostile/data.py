"""What goes in and comes out of a region, and what is written to."""

import collections
import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.recompute.hostile.common import collector, leaf
from tests.support import grads, rand

PROGRAMS: dict[str, Any] = {}
program = collector(PROGRAMS)


@dataclasses.dataclass
class Pair:
    a: Tensor
    b: Tensor


class Named(NamedTuple):
    a: Tensor
    b: Any


@program
def dataclasses_in_and_out(run, context):
    x, y = leaf(4, seed=1), leaf(4, seed=2)
    with context():
        out = run(lambda pair: Pair(pair.a.sin() * pair.b, pair.b.exp()), Pair(x, y))
        (out.a * out.b).sum().backward()
    return [x.grad, y.grad]


@program
def containers_of_all_kinds(run, context):
    x, y, z = (leaf(4, seed=i) for i in range(3))

    def function(ordered, queue, *, named, many):
        h = ordered["x"].sin() * queue[0].exp() * named.a.cos() + many["z"][0]
        return collections.OrderedDict(h=h, rest=[None, 3, "text", (h * 2).tanh()])

    with context():
        out = run(
            function, collections.OrderedDict(x=x), collections.deque([y]),
            named=Named(z, "b"), many=collections.defaultdict(list, z=[z]),
        )  # fmt: skip
        (out["h"] * out["rest"][3]).sum().backward()
    return [x.grad, y.grad, z.grad]


@program
def outputs_that_are_inputs(run, context):
    x, y = leaf(4, 4, seed=1), leaf(4, 4, seed=2)
    with context():
        same, view, fresh = run(lambda a, b: (a, b.t(), (a * b).sin()), x * 1, y * 1)
        (same * view.exp() + fresh).sum().backward()
    return [x.grad, y.grad]


@program
def outputs_nobody_uses(run, context):
    x = leaf(4, 4)
    with context():
        used, _, detached = run(lambda h: (h.sin().exp(), h.cos().exp(), h.tan().detach()), x)
        (used * detached).sum().backward()
    return [x.grad]


@program
def views_of_one_storage(run, context):
    base = leaf(6, 6)
    with context():
        h = base * 1
        out = run(lambda a, b, c, d: (a * b).sin() + c.exp() * d.sum(), h[:3], h[3:], h.t()[:3],
                  h[:1].expand(3, 6))  # fmt: skip
        out.sum().backward()
    return [base.grad]


@program
def the_same_tensor_twice(run, context):
    x = leaf(4)
    with context():
        run(lambda a, b, *, c: (a * b).sin() * c, x, x, c=x).sum().backward()
    return [x.grad]


@program
def whole_numbers_and_booleans(run, context):
    x, index, mask = leaf(6), torch.tensor([3, 1, 2]), torch.tensor([True, False, True])
    with context():
        out = run(lambda h, i, m: torch.where(m, h[i].sin(), h[:3]).exp(), x, index, mask)
        out.sum().backward()
    return [x.grad]


@program
def complex_and_conjugated(run, context):
    x = leaf(4, 2)
    with context():
        z = torch.view_as_complex(x)
        out = run(lambda c, d: (c * d.conj()).sin(), z.conj(), z * 2j)
        (out.abs() + out.real).sum().backward()
    return [x.grad]


@program
def empty_and_single(run, context):
    x, nothing, one = (
        leaf(3),
        torch.ones(0, 3, requires_grad=True),
        torch.tensor(2.0).requires_grad_(),
    )
    with context():
        out = run(lambda h, e, s: (torch.cat([h[None], e]) * s).sin(), x, nothing, one)
        out.sum().backward()
    return [x.grad, nothing.grad, one.grad]


@program
def sparse_input(run, context):
    matrix, x = torch.eye(4).to_sparse(), leaf(4, 4)
    with context():
        run(lambda m, h: torch.sparse.mm(m, h.sin()).exp(), matrix, x).sum().backward()
    return [x.grad]


class Tagged(Tensor):
    """A subclass that remembers to be one."""


@program
def tensor_subclass(run, context):
    x = leaf(4)
    with context():
        tagged = x.as_subclass(Tagged)
        out = run(lambda h: (h * h).sin(), tagged)
        out.as_subclass(Tensor).sum().backward()
    return [x.grad.as_subclass(Tensor)]


@program
def partial_of_a_partial_of_a_method(run, context):
    layer, x = nn.Bilinear(4, 4, 3), leaf(2, 4)
    with context():
        run(partial(partial(layer.forward, input2=x.sin()), x)).sin().sum().backward()
    return [x.grad, *grads(layer)]


@program
def parameter_as_an_input(run, context):
    weight, x = nn.Parameter(rand(4, 4)), leaf(2, 4)
    with context():
        out = run(lambda h, *, w: F.linear(h.sin(), w).exp(), x, w=weight)
        run(lambda h, w: F.linear(h, w[0] + 1).sin(), out, [weight]).sum().backward()
    return [x.grad, weight.grad]


@program
def output_written_to_afterwards(run, context):
    x = leaf(4, 4)
    with context():
        h = run(lambda t: t.sin() * 2, x)
        h[0].mul_(3)
        h.relu_()
        run(lambda t: t.clone().mul_(t).exp_(), h).sum().backward()
    return [x.grad]


@program
def inputs_cloned_and_written_to(run, context):
    x = leaf(4, 4)

    def function(h):
        g = h.clone()
        g[1:].mul_(2)
        g.t()[0].zero_()
        return F.leaky_relu_(g * h, 0.1).sin().index_fill_(0, torch.tensor([2]), 1.0)

    with context():
        run(function, run(function, x)).sum().backward()
    return [x.grad]
