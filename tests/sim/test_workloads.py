"""What people train, and how, gives the same bits with a session as without on the simulated
accelerator: in each of its schedulers, in each configuration, with the order of all copies checked.
"""

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import simdev
import torch
from offloading import CONFIGURATIONS, session_on_sim
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from offload.workloads import Llama, LlamaConfig, TrainableModel, UNet, VisionConfig
from tests.support import Context, assert_identical, chain, grads, in_threads, net, rand

LLAMA = LlamaConfig(
    layers=2, width=32, heads=4, kv_heads=2, hidden=64, length=32, rows=2, vocabulary=64
)
VISION = VisionConfig(size=16, rows=2, width=8, levels=2)
WIDTH = 32

Program = Callable[[Context], list[Tensor]]


@pytest.fixture(autouse=True)
def _checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lane checks that events order what it does, except among streams of the user's own:
    it cannot know how those wait for each other.
    """
    if "stream" not in request.node.name:
        monkeypatch.setenv("OFFLOAD_CHECK", "1")


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().train().to("sim")


def tokens(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(LLAMA.vocabulary, (LLAMA.rows, LLAMA.length + 1), generator=generator)
    return ids[:, :-1].to("sim"), ids[:, 1:].to("sim")


def batch(seed: int, rows: int = 16) -> Tensor:
    return rand(rows, WIDTH, seed=seed).to("sim")


def on_cpu(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().cpu() for t in tensors]


# -- models ----------------------------------------------------------------------------------------


def vision(context: Context) -> list[Tensor]:
    """Convolutions in channels_last and batch norm, trained by AdamW."""
    model = made(partial(UNet, VISION)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(2):
        images = rand(VISION.rows, 3, VISION.size, VISION.size, seed=i).to("sim")
        images = images.to(memory_format=torch.channels_last)
        with context():
            model(images, (images[:, 0] > 0).long()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*model.parameters(), *model.buffers()]


def llama(
    context: Context, wrap: Callable[..., Callable[..., Tensor]] = lambda block: block
) -> list[Tensor]:
    """RMSNorm, rotary positions, grouped queries, SwiGLU."""
    model = made(partial(Llama, LLAMA))
    assert isinstance(model, TrainableModel)
    model.wrap_block = wrap
    with context():
        loss = model(*tokens(0))
        loss.backward()
    return [loss, *grads(model)]


def recomputed(context: Context, *, use_reentrant: bool) -> list[Tensor]:
    """Each block's boundary leaves, its inside is recomputed."""
    return llama(context, lambda block: partial(checkpoint, block, use_reentrant=use_reentrant))


def mixed_precision(context: Context) -> list[Tensor]:
    """Autocast to bfloat16, with scaled losses."""
    model = made(partial(Llama, LLAMA))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("sim", init_scale=1024.0)
    for i in range(2):
        with context():
            with torch.autocast("sim", dtype=torch.bfloat16):
                loss = model(*tokens(i))
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return list(model.parameters())


def accumulation(context: Context) -> list[Tensor]:
    """Gradients of three micro-batches, clipped, then AdamW."""
    model = made(partial(net, width=WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for i in range(2):
        for k in range(3):
            with context():
                model(batch(3 * i + k)).square().mean().div(3).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


# -- threads and streams ---------------------------------------------------------------------------


def backward_in_another_thread(context: Context) -> list[Tensor]:
    model = made(partial(net, width=WIDTH))
    for i in range(2):
        with context():
            loss = model(batch(i)).square().mean()
            in_threads(loss.backward)
    return grads(model)


def two_threads(context: Context) -> list[Tensor]:
    """Each with a model and steps of its own."""
    models = [made(partial(net, width=WIDTH)) for _ in range(2)]

    def train(k: int) -> None:
        for i in range(4):
            with context():
                models[k](batch(10 * k + i)).square().mean().backward()

    in_threads(partial(train, 0), partial(train, 1))
    return grads(*models)


def side_stream(context: Context) -> list[Tensor]:
    """A part of the forward, and a tensor that it uses, on a stream of the user's."""
    model = made(partial(net, width=WIDTH))
    scale = nn.Parameter(torch.ones(WIDTH, device="sim"))
    stream = torch.Stream(device="sim")
    for i in range(3):
        x = batch(i)
        with context():
            main = torch.accelerator.current_stream()
            stream.wait_stream(main)
            with stream:
                side = (x * scale).sin().cos()
                made_there = (x * 2).exp()
            h = model(x)
            main.wait_stream(stream)
            for tensor in (side, made_there):
                tensor.record_stream(main)
            x.record_stream(stream)
            loss = (h * side * made_there * scale).square().mean()
            del h, side, made_there, tensor
            loss.backward()
    return [scale.grad, *grads(model)]


# -- graphs ----------------------------------------------------------------------------------------


def retained(context: Context) -> list[Tensor]:
    """Three backwards over one graph, with other work in between."""
    model = made(partial(net, width=WIDTH))
    with context():
        loss = model(batch(0)).square().mean()
        loss.backward(retain_graph=True)
        model(batch(1)).square().mean().backward()
        loss.backward(retain_graph=True)
        loss.backward()
    return grads(model)


def double_backward(context: Context) -> list[Tensor]:
    """A gradient of a gradient, after the step."""
    x = batch(0).requires_grad_()
    w = batch(1, WIDTH).requires_grad_()
    with context():
        loss = ((x @ w).tanh() ** 2 * x.exp()).mean()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
    (g * g).mean().backward()
    return [x.grad, w.grad]


def first_in_first_out(context: Context) -> list[Tensor]:
    """Four forwards before the backwards, as pipelines do."""
    model = made(partial(net, width=WIDTH))
    losses = []
    for i in range(4):
        with context():
            losses.append(model(batch(i)).square().mean())
    while losses:
        losses.pop(0).backward()
    return grads(model)


def dropped(context: Context) -> list[Tensor]:
    """Forwards that nobody differentiates, while their copies are on their way."""
    model = made(partial(net, width=WIDTH))
    for i in range(3):
        with context():
            kept = model(batch(i)).square().mean()
            model(batch(i + 9)).square().mean()
            kept.backward()
            del kept
    return grads(model)


class FailsOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h: Tensor, failed: list[int]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.failed = failed
        return h * 1

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, None]:
        if not ctx.failed:
            ctx.failed.append(1)
            raise LookupError("backward")
        return g, None


def exceptions(context: Context) -> list[Tensor]:
    """One in forward, one in backward, then a good step."""
    model = made(partial(net, width=WIDTH))
    with contextlib.suppress(LookupError), context():
        model(batch(0))
        raise LookupError("forward")
    with contextlib.suppress(LookupError), context():
        FailsOnce.apply(model(batch(1)), []).square().mean().backward()
    for p in model.parameters():
        p.grad = None  # how far the failed backward came depends on nothing, but is no result
    with context():
        model(batch(2)).square().mean().backward()
    return grads(model)


MODELS: dict[str, Program] = {
    "vision": vision,
    "llama": llama,
    "checkpoint": partial(recomputed, use_reentrant=False),
    "reentrant checkpoint": partial(recomputed, use_reentrant=True),
    "mixed precision": mixed_precision,
    "accumulation": accumulation,
}
WAYS: dict[str, Program] = {
    f.__name__: f
    for f in (
        backward_in_another_thread, two_threads, side_stream, retained, double_backward,
        first_in_first_out, dropped, exceptions,
    )
}  # fmt: skip


def assert_same(program: Program, directory: Path, name: str) -> None:
    """The program computes the same without and with a session; something moved. How much had to
    come back depends on how far the copies out had come, unless nothing is asynchronous.
    """
    torch.manual_seed(1)
    expected = on_cpu(program(contextlib.nullcontext))
    torch.manual_seed(1)
    with session_on_sim(str(directory), **CONFIGURATIONS[name]) as session:
        got = on_cpu(program(session.step))
        report = session.report()
    assert_identical(expected, got)
    assert report.offloaded_bytes > 0
    assert report.reloaded_bytes > 0 or simdev.config().scheduler is not simdev.Scheduler.EAGER
    assert simdev.races() == []


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("program", MODELS)
def test_model(scheduler, program: str, name: str, tmp_path: Path) -> None:
    assert_same(MODELS[program], tmp_path, name)


# the parameters are used on two streams on purpose
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("program", WAYS)
def test_way_to_train(scheduler, program: str, name: str, tmp_path: Path) -> None:
    assert_same(WAYS[program], tmp_path, name)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.parametrize("direction", simdev.Direction)
def test_failed_copy(scheduler, direction, nth: int, name: str, tmp_path: Path) -> None:
    """The device's error comes out where the host waits for it, nothing hangs, and the session
    works again in the next step.
    """
    x = torch.linspace(0, 1, 1024, device="sim").requires_grad_()
    (expected,) = torch.autograd.grad(chain(x, 8), x)
    torch.accelerator.synchronize()
    with session_on_sim(str(tmp_path), **CONFIGURATIONS[name]) as session:
        simdev.inject_copy_fault(direction, nth)
        with pytest.raises(RuntimeError, match="simdev"):
            with session.step():
                loss = chain(x, 8)
                torch.accelerator.synchronize()  # all is out: it has to come back
                torch.autograd.grad(loss, x)
            torch.accelerator.synchronize()
        loss = None
        with session.step():
            (got,) = torch.autograd.grad(chain(x, 8), x)
        assert torch.equal(expected, got)
