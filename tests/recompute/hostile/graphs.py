"""What is around a region: graphs, hooks, contexts, threads."""

import copy
import warnings
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from tests.recompute.hostile.common import collector, leaf
from tests.support import grads, in_threads, net, rand

PROGRAMS: dict[str, Any] = {}
program = collector(PROGRAMS)


@program
def one_output_in_two_regions(run, context):
    model, x = net(), leaf(4, 16)
    with context():
        h = run(model, x)
        (run(model, h) * run(torch.sin, h)).sum().backward()
    return [x.grad, *grads(model)]


@program
def four_levels_with_dropout(run, context):
    model, x = nn.Sequential(net(), nn.Dropout(0.4)), leaf(4, 16)

    def level(depth, h):
        h = F.dropout(model(h), 0.2)
        return run(partial(level, depth - 1), h).sin() if depth else h

    with context():
        run(partial(level, 3), x).sum().backward()
    return [x.grad, *grads(model)]


@program
def step_by_step_through_time(run, context):
    cell, xs, h = nn.GRUCell(4, 8), leaf(6, 2, 4), torch.zeros(2, 8)
    losses = []
    with context():
        for x in xs:
            h = run(cell, x, h)
            losses.append(h.pow(2).mean())
        torch.stack(losses).sum().backward()
    return [xs.grad, *grads(cell)]


@program
def recurrent_module(run, context):
    model, x = nn.LSTM(4, 8, num_layers=2, dropout=0.3), leaf(5, 2, 4)
    with context():
        out, (h, c) = run(model, x)
        (out.sum() + (h * c).sum()).backward()
    return [x.grad, *grads(model)]


@program
def gradient_penalty(run, context):
    weight, x = leaf(4, 4), leaf(2, 4, seed=1)
    with context():
        h = x * 1
        out = run(lambda t: F.linear(t.sin(), weight).exp(), h)
        (g,) = torch.autograd.grad(out.sum(), h, create_graph=True)
        (out.sum() + g.pow(2).sum()).backward()
    return [g.detach(), x.grad, weight.grad]


@program
def backward_of_some_inputs(run, context):
    model, x, y = net(), leaf(4, 16), leaf(4, 16, seed=1)
    with context():
        out = run(lambda a, b: model(a) * b.sin(), x, y).sum()
        out.backward(inputs=[y], retain_graph=True)
        first = y.grad.clone()
        out.backward()
    return [first, x.grad, y.grad, *grads(model)]


@program
def frozen_inside_trained_outside(run, context):
    frozen, trained, x = net(1).requires_grad_(False), net(2), leaf(4, 16)
    with context():
        run(trained, run(frozen, run(trained, x))).sum().backward()
    return [x.grad, *grads(trained)]


@program
def nothing_but_parameters_wants_gradients(run, context):
    model, x = net(), rand(4, 16)
    with context():
        run(model, x).sum().backward()
    return grads(model)


@program
def tied_weights(run, context):
    embed, x = nn.Embedding(10, 8), torch.tensor([[1, 2, 3], [4, 1, 0]])
    head = nn.Linear(8, 10, bias=False)
    head.weight = embed.weight
    with context():
        h = run(embed, x)
        run(lambda t: head(t.sin()), h).logsumexp(-1).sum().backward()
    return grads(embed)


@program
def grad_mode_switched_inside(run, context):
    model, x = net(), leaf(4, 16)

    def function(h):
        with torch.no_grad():
            scale = model(h).abs().max()
        with torch.set_grad_enabled(False), torch.enable_grad():
            h = model(h) / scale
        return h.detach() + h.sin()

    with context():
        run(function, x).sum().backward()
    return [x.grad, *grads(model)]


@program
def anomaly_detection(run, context):
    model, x = net(), leaf(4, 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Anomaly Detection has been enabled")
        with torch.autograd.detect_anomaly(), context():
            run(model, run(model, x)).sum().backward()
    return [x.grad, *grads(model)]


@program
def hooks_that_change_things(run, context):
    model, x = net(), leaf(4, 16)
    handles = [
        model[0].register_forward_pre_hook(lambda _, args: (args[0] * 2,)),
        model[2].register_forward_hook(lambda _, args, out: out + args[0]),
        model[3].weight.register_hook(lambda g: g * 3),
        x.register_hook(lambda g: g.sin()),
    ]
    with context():
        h = run(model, x)
        h.register_hook(lambda g: g + 1)
        run(model, h).sum().backward()
    for handle in handles:
        handle.remove()
    return [x.grad, *grads(model)]


@program
def hooks_of_others_around_and_inside(run, context):
    model, x = net(), leaf(4, 16)

    def function(h):
        h = model[0](h)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):
            return model[4](model[3](h.sin()))

    with torch.autograd.graph.save_on_cpu(), context():
        run(function, x).sum().backward()
    return [x.grad]


@program
def autocast_on_off_and_on(run, context):
    model, x = net(), leaf(4, 16)

    def inner(h):
        with torch.autocast("cpu", torch.float16):
            return model[3](h)

    def function(h):
        h = model[0](h)
        with torch.autocast("cpu", enabled=False):
            h = run(inner, h.float())
        return model[3](h)

    with context():
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            h = run(function, x)
        h.float().sum().backward()
    return [x.grad, *(p.grad for p in (*model[0].parameters(), *model[3].parameters()))]


@program
def replicas_in_threads(run, context):
    """As DataParallel does it: each replica's forward on a thread, one backward for all."""
    model, xs = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)),
        [leaf(2, 8, seed=i) for i in range(3)],
    )
    outs: list[Any] = [None] * 3

    def replica(i):
        with torch.enable_grad(), context():
            outs[i] = run(lambda h: model(run(model, h)), xs[i]).sum()

    in_threads(*(partial(replica, i) for i in range(3)))
    torch.stack(outs).sum().backward()
    return [*(x.grad for x in xs), *grads(model)]


@program
def copies_of_the_model_between(run, context):
    model, x = net(), leaf(4, 16)
    with context():
        h = run(model, x)
        twin = copy.deepcopy(model)
        run(twin, h).sum().backward()
    return [x.grad, *grads(model), *grads(twin)]


@program
def both_kinds_of_torch_inside(run, context):
    model, x = net(), leaf(4, 16)
    with context():
        h = run(lambda t: torch_checkpoint(model, t.sin(), use_reentrant=False).cos(), x)
        run(lambda t: torch_checkpoint(model, t.sin(), use_reentrant=False), h).sum().backward()
    return [x.grad, *grads(model)]


@program
def microbatches_interleaved(run, context):
    model, xs = net(), [leaf(4, 16, seed=i) for i in range(3)]
    with context():
        first = run(model, xs[0]).sum()
        second = run(model, xs[1]).sum()
        first.backward()
        third = run(model, xs[2]).sum()
        (third + second).backward()
    return [*(x.grad for x in xs), *grads(model)]


@program
def backward_inside_a_region(run, context):
    x = leaf(4)

    def function(h):
        g = h.detach().requires_grad_()
        with torch.enable_grad():
            run(lambda t: t.sin().exp(), g).sum().backward()
        return h.cos() * g.grad

    with context():
        run(function, x).sum().backward()
    return [x.grad]
