"""What a region calls."""

import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.recompute.hostile.common import collector, leaf
from tests.support import grads, net, rand

PROGRAMS: dict[str, Any] = {}
program = collector(PROGRAMS)


class Square(torch.autograd.Function):
    """Saves an input, an output and something that is no tensor."""

    @staticmethod
    def forward(ctx, h, power):
        out = h**power
        ctx.save_for_backward(h, out)
        ctx.power = power
        sign = h.sign()
        ctx.mark_non_differentiable(sign)
        return out, sign

    @staticmethod
    def backward(ctx, g, _):
        h, out = ctx.saved_tensors
        return g * ctx.power * out / h, None


@program
def function_of_ones_own(run, context):
    x = leaf(4)
    with context():
        out, sign = run(lambda h: Square.apply(h.exp(), 3), x)
        (out * sign).sum().backward()
    return [x.grad]


@program
def vmap_inside(run, context):
    model, x = net(), leaf(3, 4, 16)
    with context():
        run(lambda h: torch.vmap(model)(h).sin(), x).sum().backward()
    return [x.grad, *grads(model)]


@program
def other_parameters_by_functional_call(run, context):
    model, x = net(), leaf(4, 16)
    others = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    with context():
        out = run(lambda h, p: torch.func.functional_call(model, p, (h,)).sin(), x, others)
        out.sum().backward()
    return [x.grad, *(p.grad for p in others.values())]


@program
def parametrized_weights(run, context):
    layer, x = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), leaf(4, 8)
    with context():
        run(layer, run(layer, x)).sum().backward()
    return [x.grad, *grads(layer)]


@program
def attention_of_torch(run, context):
    model, x = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), leaf(2, 5, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    with context():
        run(model, run(model, x, src_mask=mask), mask, is_causal=True).sum().backward()
    return [x.grad, *grads(model)]


@program
def sparse_gradients(run, context):
    bag, index = nn.EmbeddingBag(10, 4, mode="sum", sparse=True), torch.tensor([[1, 2], [1, 9]])
    with context():
        run(lambda i: bag(i).sin(), index).sum().backward()
    return [bag.weight.grad.to_dense()]


@program
def images_in_channels_last(run, context):
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2)
    )
    model, x = model.to(memory_format=torch.channels_last), leaf(2, 3, 8, 8)
    with context():
        run(model, x.contiguous(memory_format=torch.channels_last)).sum().backward()
    return [x.grad, *grads(model)]


@program
def normalisation_in_evaluation(run, context):
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), leaf(6, 4)
    model(rand(6, 4))
    model.eval()
    with context():
        run(model, x).sin().sum().backward()
    return [x.grad, *grads(model), *model.buffers()]


@program
def generator_of_ones_own_that_is_set(run, context):
    generator, x = torch.Generator(), leaf(4, 4)

    def function(h):
        generator.manual_seed(3)
        noise = torch.rand(4, 4, generator=generator)
        if random.Random(5).random() < 0.9:
            h = F.dropout(h, 0.5)
        return (h * noise).sin()

    with context():
        run(function, run(function, x)).sum().backward()
    return [x.grad]


@program
def layers_from_a_generator(run, context):
    model, x = net(), leaf(4, 16)

    def function(h):
        for layer in (child for child in model.children() if not isinstance(child, nn.GELU)):
            h = layer(h)
        return h

    with context():
        run(function, x).sum().backward()
    return [x.grad, model[0].weight.grad]
