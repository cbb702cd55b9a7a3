"""Recomputing what is cheap: the same bits, fewer operations, and nothing kept that may leave."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload import Session
from offload.engines import Engine, Request, Slot
from offload.live import LiveBytes, storage_of
from tests.conftest import Opener
from tests.doubles import WrappedEngine
from tests.support import assert_identical, drain, grads, net, rand

aten = torch.ops.aten
WIDTH = 16


class Attention(nn.Module):
    """Fused attention between projections, as in a transformer, with dropout on either side."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(self.norm(x), 0.2)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(h).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        return x + F.dropout(self.out(h.transpose(1, 2).flatten(2)), 0.2)


class InPlace(nn.Module):
    """Writes to results of products: itself, through a view, and through ``_unsafe_view``."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.c = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)  # of three dimensions: an _unsafe_view of the product
        h.add_(1).sin_()
        h = self.b(h)
        h.data.mul_(2)  # under no version at all
        h = torch.relu_(self.b(h.tanh()))
        h = self.c(h)
        h[0].mul_(3)
        return h.tanh()


class Images(nn.Module):
    """Convolution, normalisation and rectifier, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
            nn.Conv2d(8, 4, 3), nn.ReLU(inplace=True), nn.Dropout2d(0.3), nn.Conv2d(4, 3, 1),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(0).unflatten(1, (-1, 1)).expand(-1, -1, 3, -1, -1)[0]
        return self.layers(x)


class Random(nn.Module):
    """Draws between other draws."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.dropout(x.sin(), 0.3)
        h = h * torch.rand_like(h)
        h = F.dropout(h.cos(), 0.3)
        return h * torch.bernoulli(torch.full_like(h, 0.5)) * torch.randn_like(h)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "net": net,
    "attention": Attention,
    "attention with dropout": lambda: Attention(0.2),
    "in place": InPlace,
    "images": Images,
    "random": Random,
}
LISTS: dict[str, dict[str, Any]] = {
    "default": {},
    "kept": {"save": [aten.mm, aten.addmm, aten.convolution]},
    "random": {"offload": [aten.rand_like, aten.bernoulli, aten.mm], "save": [aten.randn_like]},
    "everything": {"policy_fn": lambda *_, **__: CheckpointPolicy.MUST_CPU_OFFLOAD},
    "everything kept": {"policy_fn": lambda *_, **__: True},
}


def run(
    make: Callable[[], nn.Module],
    context_fn: Any = None,
    step: Callable[[], Any] = contextlib.nullcontext,
    checkpoint: Any = offload.checkpoint,
    autocast: bool = False,
    rounds: int = 2,
) -> list[Tensor]:
    """What a module gives and the gradients it gets, in ``rounds`` regions one after the other."""
    torch.manual_seed(3)
    module = make()
    results = []
    x = rand(4, 5, WIDTH, seed=1).requires_grad_()
    with step():
        for _ in range(rounds):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                h = x * 1
                for _ in range(2):
                    if context_fn is None:
                        out = module(h)
                    else:
                        out = checkpoint(module, h, context_fn=context_fn)
                    h = out if out.shape == h.shape else h
            out.float().pow(2).sum().backward()
            results.append(out.detach())
    state = [b.clone() for b in module.buffers()]
    return [*results, x.grad, *grads(module), *state, torch.get_rng_state()]


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
    model, x = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), rand(8, 32)
    x.requires_grad_()
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


class Alive(TorchDispatchMode):
    """Counts the storages that operations made, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = LiveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = storage_of(leaf) if isinstance(leaf, Tensor) else None
            if storage is not None:
                self.live.track(storage)
        return result


def test_live_bytes(open_session: Opener) -> None:
    """No more on the device than full recomputation has, after the forward and at the peak."""
    blocks = nn.Sequential(*(Attention() for _ in range(6)))
    session = open_session()

    def measure(**options: Any) -> tuple[int, int]:
        with session.step(), Alive() as alive:
            x = rand(8, 64, WIDTH).requires_grad_()
            h = x
            for block in blocks:
                h = offload.checkpoint(block, h, **options)
            drain(session)
            waiting_bytes = alive.live.alive_bytes
            h.sum().backward()
        assert session.held_bytes <= session.config.arena_bytes
        return waiting_bytes, alive.live.peak_bytes

    full = measure()
    selective = measure(context_fn=offload.selective())
    kept = measure(context_fn=offload.selective(save=[aten.mm, aten.addmm]))
    assert selective[0] <= full[0]
    assert selective[1] <= full[1]
    assert kept[0] >= full[0] + 6 * 8 * 64 * 4 * WIDTH * 4


class LoggingEngine(WrappedEngine):
    """Notes each read."""

    def __init__(self, inner: Engine, log: list[str]) -> None:
        super().__init__(inner)
        self._log = log

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        self._log.append("demanded" if urgent else "ahead")
        return super().read(slot, offset, urgent=urgent, checksum=checksum)


def test_all_cells_start_back_before_the_recomputation(
    open_session: Opener, real_engine: Engine
) -> None:
    """In the first step too, which nothing was learned for, and with room for one region only."""
    log: list[str] = []
    engine = LoggingEngine(real_engine, log)
    session = open_session(_engine=engine, prefetch_bytes=4 * 64 * 16 * 4)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4)))

    def region(x: Tensor) -> Tensor:
        log.append("runs")
        return model(x)

    with session.step():
        h = rand(64, 16).requires_grad_() * 1
        for _ in range(2):
            h = offload.checkpoint(region, h, context_fn=offload.selective())
        drain(session)
        log.clear()
        h.sum().backward()
    assert log[: log.index("runs")] == ["demanded", *["ahead"] * 4]  # the input, the results
    assert log.count("demanded") == 1
    assert log.count("ahead") == 4 + 5


def test_cells_start_back_where_the_input_is_kept(
    open_session: Opener, real_engine: Engine
) -> None:
    """Nobody asks for anything before the recomputation."""
    log: list[str] = []

    def policy(tensor: offload.SavedTensor) -> offload.Placement:
        return offload.Placement.KEEP if tensor.size[-1] == 8 else offload.Placement.DISK

    session = open_session(_engine=LoggingEngine(real_engine, log), policy=policy)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 32), nn.GELU())

    def region(x: Tensor) -> Tensor:
        log.append("runs")
        return model(x)

    with session.step():
        out = offload.checkpoint(
            region, rand(64, 8).requires_grad_(), context_fn=offload.selective()
        )
        drain(session)
        log.clear()
        out.sum().backward()
    assert log == ["ahead", "ahead", "runs"]


def test_results_that_nobody_asks_for(session: Session) -> None:
    """A recomputation ends before the last product: the next forward does not hold it."""
    a, b, c = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)
    context_fn = offload.selective()

    def step(region: Callable[[Tensor], Tensor]) -> tuple[int, int]:
        x = rand(4, 16).requires_grad_()
        with FlopCounterMode(display=False) as counter, session.step() as step:
            offload.checkpoint(region, x, context_fn=context_fn).sum().backward()
        return step.report.offloaded_bytes, counter.get_total_flops()

    def block(x: Tensor) -> Tensor:
        return x + b(a(x).relu())

    def longer(x: Tensor) -> Tensor:
        return c(b(a(x).relu()))

    (first, flops), (second, again) = step(block), step(block)
    assert (first, second) == (4 * (16 + 32 + 16) * 4, 4 * (16 + 32) * 4)
    assert flops == again
    _, guessed = step(longer)  # the same operation's second result is wanted here
    offloaded, known = step(longer)
    assert guessed - known == 2 * 4 * 32 * 16
    assert offloaded == 4 * (16 + 32 + 16 + 16) * 4 - 4 * 16 * 4  # its third is not


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


def test_retained_graph(session: Session) -> None:
    """A second backward finds every result again."""
    x = rand(4, 16).requires_grad_()
    model = net()
    with session.step():
        out = offload.checkpoint(model, x, context_fn=offload.selective()).sum()
        (first,) = torch.autograd.grad(out, x, retain_graph=True)
        with FlopCounterMode(display=False) as counter:
            (second,) = torch.autograd.grad(out, x, retain_graph=True)
        (third,) = torch.autograd.grad(out, x)
    assert_identical([first, first], [second, third])
    assert counter.get_total_flops() == 2 * 2 * 4 * 16 * 16  # of backward itself


def test_result_modified_after_the_region(open_session: Opener) -> None:
    """In place, under the version of the result or under one of its own: recomputed."""
    for make in (lambda: nn.Linear(16, 16), lambda: nn.Linear(16, 16, bias=False)):

        def program(context_fn: Any, step: Any, make: Any = make) -> list[Tensor]:
            torch.manual_seed(0)
            first, x = make(), rand(2, 3, 16).requires_grad_()

            def region(x: Tensor) -> tuple[Tensor, Tensor]:
                h = first(x)
                return h, h.sin() * h.detach().exp()

            with step():
                if context_fn is None:
                    h, g = region(x)
                    h = h * 5  # torch itself would not allow it in place
                else:
                    h, g = offload.checkpoint(region, x, context_fn=context_fn)
                    h.mul_(5)
                (h.sum() + g.sum()).backward()
            return [x.grad, first.weight.grad]

        expected = program(None, contextlib.nullcontext)
        for options in ({"keep_last_bytes": 1 << 20}, {}):
            step = open_session(**options).step
            assert_identical(expected, program(offload.selective(), step))
        assert_identical(expected, program(offload.selective(), contextlib.nullcontext))


def test_dropped_graph(session: Session) -> None:
    """Nothing is left of a region that no backward ever asks for."""
    with session.step():
        out = offload.checkpoint(
            net(), rand(4, 16).requires_grad_(), context_fn=offload.selective()
        )
    assert session._hooks.live_blocks > 1
    del out
    assert session._hooks.live_blocks == 0


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

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_identical(expected, got)


def test_no_random_state_is_set_that_was_not_preserved() -> None:
    """Without ``preserve_rng_state`` the generator belongs to others when backward runs."""
    x = rand(8, 16).requires_grad_()
    context_fn = offload.selective(save=[aten.rand_like])
    out = offload.checkpoint(
        lambda x: (x.sin() * torch.rand_like(x)).cos(), x, context_fn=context_fn,
        preserve_rng_state=False,
    )  # fmt: skip
    torch.manual_seed(1)
    before = torch.get_rng_state()
    out.sum().backward()
    assert torch.equal(before, torch.get_rng_state())


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
