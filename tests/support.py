"""What tests share: programs to run with and without a session, and a probe."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

import offload

Context = Callable[[], AbstractContextManager[Any]]
Step = Callable[[Context], list[Tensor]]


def assert_identical(expected: list[Tensor], got: list[Tensor]) -> None:
    """Equal bits, dtype, shape and strides."""
    assert len(expected) == len(got)
    for i, (a, b) in enumerate(zip(expected, got, strict=True)):
        assert type(a) is type(b)
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()), f"result {i}"
        assert torch.equal(a, b) or _same_bits(a, b), f"result {i} differs by {(a - b).abs().max()}"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """For NaNs: unequal to themselves, yet the same bits."""
    return torch.equal(torch.nan_to_num(a, nan=0.5), torch.nan_to_num(b, nan=0.5))


def assert_same(step: Step, session: offload.Session) -> None:
    """``step(context)`` gives the same with steps of ``session`` as with none."""
    torch.manual_seed(0)
    expected = step(contextlib.nullcontext)
    torch.manual_seed(0)
    assert_identical(expected, step(session.step))


def ints(*size: int, seed: int = 0) -> Tensor:
    """Small whole numbers as doubles: sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, size, generator=generator).double()


def rand(*size: int, seed: int = 0) -> Tensor:
    """Normal floats that depend on nothing but the seed."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def net(seed: int = 0, width: int = 16) -> nn.Sequential:
    """Five layers whose operations save inputs, outputs and statistics."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()
    )


def train_net(context: Context) -> list[Tensor]:
    """One step of ``net()``, its gradients: a program for ``assert_same``."""
    model = net()
    with context():
        model(rand(4, 16)).sum().backward()
    return grads(model)


def grads(*modules: nn.Module) -> list[Tensor]:
    """The gradients of all parameters."""
    found = [p.grad for m in modules for p in m.parameters()]
    assert all(g is not None for g in found)
    return [g for g in found if g is not None]


class Probe(torch.autograd.Function):
    """Doubles its input, and logs where and how the saved input comes back."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, log: dict[str, tuple[int, tuple[int, ...]]]) -> Tensor:
        ctx.save_for_backward(h)
        ctx.log = log
        log["saved"] = (h.data_ptr(), h.stride())
        return h * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        ctx.log["back"] = (h.data_ptr(), h.stride())
        return g * 2, None


def chain(x: Tensor, length: int) -> Tensor:
    """A loss whose graph saves ``x`` and ``length - 1`` results that nobody else holds."""
    for _ in range(length):
        x = x.sin()
    return x.sum()


def scratch_files(directory: str | os.PathLike[str]) -> list[os.stat_result]:
    """The nameless files that this process has open in ``directory``."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{fd}")
            if target.startswith(f"{os.path.realpath(directory)}/"):
                found.append(os.fstat(int(fd)))
    return found


def drain(session: offload.Session) -> None:
    """See all copies, writes and reads of ``session`` out."""
    tiers = session._tiers
    with tiers.lock:
        tiers.common.lane.drain()
        tiers.poll()
        for transfer in (*tiers.disk.writes, *tiers.disk.reads):
            with contextlib.suppress(OSError):
                transfer.request.wait()
        tiers.poll()
        assert not tiers.disk.writes
        assert not tiers.disk.reads


def in_threads(*bodies: Callable[[], None]) -> None:
    """Run ``bodies`` at once, each in a thread, and raise what the first of them raised."""
    failed: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


@contextlib.contextmanager
def in_child() -> Iterator[Callable[[Callable[[], None]], None]]:
    """``run(body)`` runs ``body`` in a forked child and fails if it raises there."""
    pids: list[int] = []

    def run(body: Callable[[], None]) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                body()
                message = b"fine"
            except BaseException as e:
                message = repr(e).encode()
            os.write(writer, message)
            os._exit(0)
        pids.append(pid)
        os.close(writer)
        with os.fdopen(reader, "rb") as f:
            said = f.read().decode()
        assert said == "fine", said or "the child died"

    try:
        yield run
    finally:
        for pid in pids:
            os.waitpid(pid, 0)
