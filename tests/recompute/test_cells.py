"""What is held of a selective region: where it is, until when, and whether it may be used."""

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload import Session
from offload.engines import Engine, Request, Slot
from offload.tensors.live import LiveBytes, storage_of
from tests.conftest import Opener
from tests.doubles import WrappedEngine
from tests.recompute.blocks import WIDTH, Attention
from tests.support import assert_identical, drain, net, rand

aten = torch.ops.aten


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
    session = open_session(_engine=engine, prefetch_bytes=5 * 64 * 16 * 4)
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
    """A recomputation ends before the last product: not even the first forward holds it."""
    a, b, c = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 16)

    def step(region: Callable[[Tensor], Tensor], **options: Any) -> tuple[int, int]:
        x = rand(4, 16).requires_grad_()
        context_fn = offload.selective()
        with FlopCounterMode(display=False) as counter, session.step() as step:
            offload.checkpoint(region, x, context_fn=context_fn, **options).sum().backward()
        return step.report.offloaded_bytes, counter.get_total_flops() // (2 * 4 * 16)

    def block(x: Tensor) -> Tensor:
        return x + b(a(x).relu())

    def longer(x: Tensor) -> Tensor:
        return c(b(a(x).relu()))

    assert step(block) == (4 * (16 + 32) * 4, 3 * (32 + 32))
    assert step(longer) == (4 * (16 + 32 + 16) * 4, 3 * (32 + 32 + 16))
    # To the end, it runs it again.
    assert step(block, early_stop=False) == (4 * (16 + 32) * 4, 3 * (32 + 32) + 32)


def test_results_that_nobody_asks_for_do_not_stay() -> None:
    """Nor those that were to be kept, nor several in a row."""
    a, b = nn.Linear(16, 16), nn.Linear(16, 16).requires_grad_(False)
    x = rand(4, 16).requires_grad_()
    frozen = rand(4, 16)

    def region(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return a(x.sin()), b(frozen), b(frozen + 1)

    out, *others = offload.checkpoint(
        region, x, context_fn=offload.selective(save=[aten.mm, aten.addmm])
    )
    died = [weakref.ref(t.untyped_storage()) for t in (out, *others)]
    grad_fn = out.grad_fn
    del out, others
    assert [r() for r in died] == [None] * 3
    assert grad_fn is not None


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


def test_result_modified_at_once(session: Session) -> None:
    """By a rectifier: it is not copied for nothing."""
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh())
    with session.step() as step:
        x = rand(4, 16).requires_grad_()
        offload.checkpoint(model, x, context_fn=offload.selective()).sum().backward()
    assert step.report.offloaded_bytes == 4 * (16 + 16) * 4  # input, and the second product


def test_dropped_graph(session: Session) -> None:
    """Nothing is left of a region that no backward ever asks for."""
    with session.step():
        out = offload.checkpoint(
            net(), rand(4, 16).requires_grad_(), context_fn=offload.selective()
        )
    assert session._hooks.live_blocks > 1
    del out
    assert session._hooks.live_blocks == 0


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
