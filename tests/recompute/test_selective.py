"""Recomputing what is cheap: the same bits, fewer operations, and nothing kept that may leave."""

import contextlib
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload import Session
from offload.tensors.live import LiveBytesMeter
from tests.conftest import Opener
from tests.recompute.blocks import MODULES, WIDTH, Attention, run
from tests.support import assert_identical, grads, in_threads, net, rand

aten = torch.ops.aten


LISTS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"save": [aten.mm, aten.addmm, aten.convolution]},
    "random": {"offload": [aten.rand_like, aten.bernoulli, aten.mm], "save": [aten.randn_like]},
    "everything": {"policy_fn": lambda *_, **__: CheckpointPolicy.MUST_CPU_OFFLOAD},
    "everything kept": {"policy_fn": lambda *_, **__: True},
}


def nonreentrant(*args: Any, **kwargs: Any) -> Any:
    """The checkpoint of torch."""
    return torch_checkpoint.checkpoint(*args, use_reentrant=False, **kwargs)


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("lists", LISTS)
def test_same_bits(open_session: Opener, module: str, lists: str) -> None:
    """Whatever is offloaded, kept and recomputed, inside a step and outside."""
    expected = run(MODULES[module])
    context_fn = offload.selective(**LISTS[lists])
    session = open_session()
    assert_identical(expected, run(MODULES[module], context_fn))
    assert_identical(expected, run(MODULES[module], context_fn, session.step))


@pytest.mark.parametrize("module", ["net", "attention", "in place"])
def test_same_bits_on_each_engine(session: Session, module: str) -> None:
    """Native and aio."""
    expected = run(MODULES[module])
    assert_identical(expected, run(MODULES[module], offload.selective(), session.step))
    assert session.report().reloaded_bytes + session.report().forwarded_bytes > 0


@pytest.mark.parametrize("module", ["net", "attention", "in place"])
@pytest.mark.parametrize("keep_last_bytes", [0, 1 << 20])
def test_autocast(open_session: Opener, module: str, keep_last_bytes: int) -> None:
    """The products are of lower precision; some of them have not left yet."""
    session = open_session(keep_last_bytes=keep_last_bytes)
    expected = run(MODULES[module], autocast=True)
    got = run(MODULES[module], offload.selective(), session.step, autocast=True)
    assert_identical(expected, got)


def test_as_context_fn_of_torch(session: Session) -> None:
    """The session needs no other checkpoint than torch's."""
    expected = run(Attention)
    assert_identical(expected, run(Attention, offload.selective(), session.step, nonreentrant))
    assert session.report().offloaded_bytes > 2 * 2 * 4 * 5 * 3 * WIDTH * 4


def test_offloaded_bytes(open_session: Opener) -> None:
    """Inputs and the results of products, no more and no less."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Tanh())
    x = rand(8, 32).requires_grad_()
    with open_session().step() as step:
        offload.checkpoint(model, x, context_fn=offload.selective()).sum().backward()
    assert step.report.offloaded_bytes == 8 * (32 + 64 + 32) * 4
    with open_session(policy=lambda t: offload.Placement.KEEP).step() as step:
        offload.checkpoint(model, x, context_fn=offload.selective()).sum().backward()
    assert step.report.offloaded_bytes == 0
    assert step.report.kept_bytes["policy"] == 8 * (32 + 64 + 32) * 4


def test_products_are_not_recomputed(session: Session) -> None:
    """The operations of plain training, where full recomputation needs a third more."""
    blocks = nn.Sequential(*(Attention() for _ in range(3)))

    def flops(**options: Any) -> int:
        x = rand(2, 8, WIDTH).requires_grad_()
        with FlopCounterMode(display=False) as counter, session.step():
            for block in blocks:
                x = offload.checkpoint(block, x, **options) if options else block(x)
            x.sum().backward()
        return counter.get_total_flops()

    plain, full = flops(), flops(preserve_rng_state=True)
    assert full > 1.2 * plain
    assert flops(context_fn=offload.selective()) == plain
    some = flops(context_fn=offload.selective(recompute=[aten.addmm]))
    assert plain < some < full


def test_policy_of_ones_own(open_session: Opener) -> None:
    """CPU_OFFLOAD offloads; it would recompute in torch. A bool saves or recomputes."""
    seen = []

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        assert ctx.op_output is not None
        seen.append(op)
        if op is aten.mm.default:
            return CheckpointPolicy.MUST_CPU_OFFLOAD
        if op is aten.addmm.default:
            return CheckpointPolicy.PREFER_CPU_OFFLOAD
        return op is aten._scaled_dot_product_flash_attention_for_cpu.default

    session = open_session()
    context_fn = offload.selective(policy)
    assert_identical(run(Attention), run(Attention, context_fn, session.step))
    assert aten.native_layer_norm.default in seen
    tokens_bytes = 4 * 5 * WIDTH * 4
    # Two rounds of two regions: two inputs, two products each of which one is the next's input.
    assert session.report().offloaded_bytes >= 2 * 2 * (1 + 3 + 1) * tokens_bytes
    with pytest.raises(TypeError, match="a policy returned 7"):
        run(net, offload.selective(lambda *_, **__: 7))


def test_exceptions(session: Session) -> None:
    """From the forward and from the recomputation; the next region works."""
    model, calls = net(), []

    def region(x: Tensor) -> Tensor:
        calls.append(1)
        h = model(x)
        if len(calls) in (1, 3):
            raise LookupError("in the region")
        return h.sin()

    x = rand(4, 16).requires_grad_()
    for _ in range(2):  # the first call is a forward, the third a recomputation
        with pytest.raises(LookupError, match="in the region"), session.step():
            offload.checkpoint(region, x, context_fn=offload.selective()).sum().backward()
    assert_identical(run(net), run(net, offload.selective(), session.step))


def test_nested(session: Session) -> None:
    """Inside another checkpoint, selective or not, and with one inside."""

    def program(outer: Any, inner: Any) -> list[Tensor]:
        torch.manual_seed(0)
        a, b = net(1), net(2)
        x = rand(4, 16).requires_grad_()

        def region(x: Tensor) -> Tensor:
            h = F.dropout(a(x), 0.3)
            h = offload.checkpoint(b, h, context_fn=inner) if inner is not None else b(h)
            return F.dropout(h, 0.3)

        with session.step():
            for _ in range(2):
                offload.checkpoint(region, x, **outer).sum().backward()
        return [x.grad, *grads(a, b), torch.get_rng_state()]

    expected = program({}, None)
    selective = offload.selective()
    assert_identical(expected, program({}, selective))
    assert_identical(expected, program({"context_fn": selective}, None))
    assert_identical(expected, program({"context_fn": selective}, selective))


def test_under_other_hooks() -> None:
    """Without a session, offloading is what the hooks around the region do."""
    step = torch.autograd.graph.save_on_cpu
    assert_identical(run(Attention), run(Attention, offload.selective(), step))


def test_two_threads(session: Session) -> None:
    """One context_fn for regions of two threads at a time."""
    context_fn = offload.selective()
    model = Attention()

    def gradient(seed: int, step: Any, again: int) -> Tensor:
        for _ in range(again):
            x = rand(4, 8, WIDTH, seed=seed).requires_grad_()
            with step():
                h = x
                for _ in range(3):
                    h = offload.checkpoint(layers, h, context_fn=context_fn)
                (grad,) = torch.autograd.grad(h.sum(), x)
        return grad

    def layers(x: Tensor) -> Tensor:  # the random state is the process's: no dropout here
        return x + model.out(model.qkv(model.norm(x))[..., :WIDTH].tanh())

    expected = [gradient(seed, contextlib.nullcontext, 1) for seed in range(2)]
    got: list[Any] = [None, None]

    def work(seed: int) -> None:
        got[seed] = gradient(seed, session.step, 10)

    in_threads(*(functools.partial(work, seed) for seed in range(2)))
    assert_identical(expected, got)


@pytest.mark.filterwarnings("ignore")
def test_compiled_region(session: Session) -> None:
    """Traced by a compiler, and compiled inside."""
    model, x = net(), rand(4, 16).requires_grad_()
    context_fn = offload.selective()

    def region(x: Tensor) -> Tensor:
        return nonreentrant(model, x, context_fn=context_fn)

    (expected,) = torch.autograd.grad(model(x).sum(), x)
    inside = torch.compile(model, backend="aot_eager")
    for function in (
        torch.compile(region, backend="aot_eager"),
        lambda x: offload.checkpoint(inside, x, context_fn=context_fn),
    ):
        for _ in range(2):
            with session.step():
                (got,) = torch.autograd.grad(function(x).sum(), x)
            torch.testing.assert_close(got, expected)


def test_errors() -> None:
    """Each says what to do."""
    with pytest.raises(TypeError, match="save names 'mm', which is no operation"):
        offload.selective(save=["mm"])
    with pytest.raises(ValueError, match=r"aten\.mm\.default.*in two lists"):
        offload.selective(save=[aten.mm.default], offload=[aten.mm])
    with pytest.raises(ValueError, match="either a policy_fn or lists"):
        offload.selective(lambda *_: True, save=[aten.mm])
    with pytest.raises(TypeError, match="policy_fn is 3"):
        offload.selective(3)


class Inner(nn.Module):
    """A block that computes its own part again, selectively."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + offload.checkpoint(self.part, x, context_fn=offload.selective())

    def part(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_within_a_region_that_is_measured(open_session: Opener) -> None:
    """What is put above the hooks of the outer region does not hide them from the inner one."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Inner() for _ in range(4))), rand(32, 16)

    def step():
        model.zero_grad()
        model(x).square().sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = step()
    session = open_session()
    with session.apply(model, "auto", device_budget="4MiB"):
        for _ in range(8):
            with session.step():
                assert_identical(step(), expected)

    meter = LiveBytesMeter()

    def metered(block):
        def run(x):
            with meter:
                return block(x)

        return run

    with session.step():
        model.zero_grad()
        h = x
        for block in model:
            h = offload.checkpoint(metered(block), h)
        h.square().sum().backward()
    assert_identical([p.grad for p in model.parameters()], expected)
    assert meter.peak_bytes > 0
