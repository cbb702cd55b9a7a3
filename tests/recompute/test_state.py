"""What surrounds a region: random state, autocast, statistics, hooks, errors, in-place changes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import offload
from offload.recompute.statistics import modules_of
from tests.recompute.programs import assert_no_difference, direct, plain
from tests.support import assert_identical, assert_same, grads, net, rand


def test_dropout(session) -> None:
    """Also inside a region within a region."""

    def program(run, context):
        block = nn.Sequential(net(1), nn.Dropout(0.5), net(2), nn.Dropout(0.2))
        x = rand(4, 16, seed=3).requires_grad_()
        with context():
            h = run(block, x)
            h = run(lambda h: F.dropout(run(block, h), 0.3), h)
            h.pow(2).sum().backward()
        return [h.detach(), x.grad, *grads(block)]

    assert_no_difference(program, session)


@pytest.mark.parametrize("preserve", [True, False])
def test_random_numbers_are_drawn_again_if_wanted(context, preserve: bool) -> None:
    drawn = []

    def function(h):
        drawn.append(torch.rand(3))
        return (h * drawn[-1]).sin()

    x = rand(3).requires_grad_()
    with context():
        out = offload.checkpoint(function, x, preserve_rng_state=preserve).sum()
        torch.rand(5)
        state = torch.get_rng_state()
        out.backward()
    assert torch.equal(drawn[0], drawn[1]) is preserve
    assert torch.equal(torch.get_rng_state(), state) is preserve


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(session, dtype: torch.dtype) -> None:
    """Its dtype, a region of it that is off, one inside another; backward is outside of it."""
    seen = []

    def block(model, h):
        seen.append((torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
        h = model[0](h)
        with torch.autocast("cpu", enabled=False):
            seen.append(torch.is_autocast_enabled("cpu"))
            h = model[3](h.float())
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = model[5](h).float() + model[5](h).float()  # the cast weight is cached
        return model[2](model[1](h))

    def program(run, context):
        model = net().append(nn.Linear(16, 16))
        x = rand(4, 16, seed=1).requires_grad_()
        with context():
            with torch.autocast("cpu", dtype=dtype):
                h = run(block, model, run(block, model, x))
                loss = h.float().pow(2).mean()
            loss.backward()
        return [x.grad, *grads(model)]

    assert_no_difference(program, session)
    assert set(seen) == {(True, dtype), False}


def test_region_without_autocast_inside_one_with_it(session) -> None:
    def program(run, context):
        model = net()
        x = rand(4, 16, seed=1).requires_grad_()
        with context(), torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                h = run(model, x)
            run(model, h).float().pow(2).sum().backward()
        return [x.grad, *grads(model)]

    assert_no_difference(program, session)


def test_without_gradients(context) -> None:
    """Nothing is saved, in inference mode neither; grad mode inside a region is its own."""
    calls = []

    def function(h):
        calls.append(torch.is_grad_enabled())
        with torch.no_grad():
            mean = h.mean()
        return (h - mean).exp()

    x = rand(4).requires_grad_()
    with context():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert not offload.checkpoint(function, x).requires_grad
        assert calls == [False, False]
        offload.checkpoint(function, x).sum().backward()
    assert calls == [False, False, True, True]


class Normalised(nn.Module):
    """Two kinds of normalisation, one of them used twice."""

    def __init__(self, momentum=0.1):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.batch = nn.BatchNorm2d(4, momentum=momentum)
        self.instance = nn.InstanceNorm2d(4, affine=True, track_running_stats=True)

    def forward(self, x):
        return self.instance(self.batch(self.batch(self.conv(x)).relu())).sin()


WAYS = {
    "module": lambda run, model, x: run(model, x),
    "method": lambda run, model, x: run(model.forward, x),
    "closure": lambda run, model, x: run(lambda h: model(h), x),
    "argument": lambda run, model, x: run(lambda m, h: m["model"](h), {"model": model}, x),
    "nested": lambda run, model, x: run(lambda h: run(model, h), x),
}


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("way", WAYS)
def test_running_statistics_move_once(context, way: str, momentum: float | None) -> None:
    """As many batches are counted as without a checkpoint, with the same bits."""
    models = []
    for run, around in ((direct, plain), (offload.checkpoint, context)):
        torch.manual_seed(0)
        model = Normalised(momentum)
        buffers = list(model.buffers())
        for seed in (1, 2):
            x = rand(2, 3, 6, 6, seed=seed).requires_grad_()
            with around():
                WAYS[way](run, model, x).sum().backward()
        assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
        models.append([x.grad, *grads(model), *buffers])
    assert_identical(*models)


def test_running_statistics_after_an_error(context) -> None:
    """The module has its own buffers again."""
    model = nn.BatchNorm1d(4)
    buffers = list(model.buffers())
    calls = []

    def function(h):
        calls.append(1)
        h = model(h)
        if len(calls) == 2:
            raise LookupError
        return h.sin()

    with pytest.raises(LookupError), context():
        offload.checkpoint(function, rand(8, 4).requires_grad_()).sum().backward()
    assert all(a is b for a, b in zip(buffers, model.buffers(), strict=True))
    assert model.num_batches_tracked == 1


def test_modules_are_found_where_a_function_mentions_them() -> None:
    layer = nn.Linear(2, 2)
    other = nn.Linear(2, 2)
    assert modules_of(layer) == [layer]
    assert modules_of(layer.forward) == [layer]
    assert modules_of(lambda h: other(layer(h))) == [layer, other]
    forward = layer.forward
    assert modules_of(lambda h: forward(h)) == [layer]
    assert modules_of(lambda h, by_default=layer: by_default(h)) == [layer]
    assert modules_of(lambda h, *, named=layer: named(h)) == [layer]
    assert modules_of(torch.sin) == []
    assert modules_of(test_dropout) == []

    def unassigned():
        return later

    assert modules_of(unassigned) == []
    later = layer
    assert modules_of(unassigned) == [later]


def test_gradient_hooks_fire_once(context) -> None:
    fired = []
    model = net()
    model[0].register_full_backward_hook(lambda *_: fired.append("module"))
    model[0].weight.register_hook(lambda _: fired.append("parameter"))
    model[0].weight.register_post_accumulate_grad_hook(lambda _: fired.append("accumulated"))

    def function(h):
        h = model(h)
        h.register_hook(lambda _: fired.append("inside"))
        return h.sin()

    x = rand(4, 16).requires_grad_()
    x.register_hook(lambda _: fired.append("input"))
    with context():
        offload.checkpoint(function, x).sum().backward()
    assert sorted(fired) == ["accumulated", "input", "inside", "module", "parameter"]


def test_in_place_operations_inside(session) -> None:
    """On what the region made itself, also on views of it."""

    def program(run, context):
        model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, 16))
        x = rand(4, 16).requires_grad_()

        def function(h):
            h = model(h)
            h[:, 0].mul_(2)
            return h.add_(1).sigmoid_()

        with context():
            run(function, run(function, x)).sum().backward()
        return [x.grad, *grads(model)]

    assert_no_difference(program, session)


def test_accumulation_and_clipping(session) -> None:
    """Several micro-batches, then a norm over all gradients."""

    def step(context):
        blocks = nn.ModuleList(net(i) for i in range(3))
        for seed in range(3):
            h = rand(4, 16, seed=seed)
            with context():
                for block in blocks:
                    h = offload.checkpoint(block, h)
                h.pow(2).mean().backward()
        norm = nn.utils.clip_grad_norm_(blocks.parameters(), 0.5)
        return [norm, *grads(blocks)]

    assert_same(step, session)


def test_deterministic_algorithms(session) -> None:
    def program(run, context):
        x = rand(8).requires_grad_()
        with context():
            run(lambda h: h.sin().index_add(0, torch.tensor([1, 1]), h[:2]), x).sum().backward()
        return [x.grad]

    torch.use_deterministic_algorithms(True)
    try:
        assert_no_difference(program, session)
    finally:
        torch.use_deterministic_algorithms(False)


def test_inside_and_around_torchs_own(session) -> None:
    """Ours in torch's, torch's in ours: whatever the model already does."""

    def step(context):
        model = net()
        x = rand(4, 16).requires_grad_()
        with context():
            h = torch_checkpoint(
                lambda h: offload.checkpoint(model, h).sin(), x, use_reentrant=False
            )
            h = torch_checkpoint(
                lambda h: offload.checkpoint(model, h).sin(), h, use_reentrant=True
            )
            h = offload.checkpoint(lambda h: torch_checkpoint(model, h, use_reentrant=False), h)
            h.pow(2).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)


def test_graphs_of_several_forwards(context) -> None:
    """Their backwards in any order."""
    model = net()
    inputs = [rand(4, 16, seed=i).requires_grad_() for i in range(3)]
    outs = []
    with context():
        for x in inputs:
            outs.append(offload.checkpoint(model, x).sum())
    for i in (1, 2, 0):
        outs[i].backward()
    for x in inputs:
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(x.grad, expected)
