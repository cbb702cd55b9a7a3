"""What users do that nobody thought of."""

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch

import offload
from offload import Session
from tests.doubles import LazyEngine
from tests.support import assert_same, chain, drain, grads, in_threads, rand, train_net


@pytest.mark.parametrize("nbytes", [0, 100, 1 << 16])
@pytest.mark.parametrize("keep_last_bytes", [0, 1 << 20])
def test_storage_resized_after_it_was_saved(
    open_session, engine: str, nbytes: int, keep_last_bytes: int
) -> None:
    """Sharding libraries empty storages and fill them again; data buffers grow."""
    session = open_session(engine=engine, keep_last_bytes=keep_last_bytes)
    w = torch.ones(1024, requires_grad=True)
    x = torch.full((1024,), 3.0)
    with session.step():
        loss = (x * w).sum()
        x.untyped_storage().resize_(nbytes)
    x.untyped_storage().resize_(4096)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(x):
        x.fill_(3.0)
    del x
    loss.backward()
    assert torch.equal(w.grad, torch.full((1024,), 3.0))


def test_memory_that_is_not_torchs(session: Session, tmp_path_factory: Any) -> None:
    """Arrays of numpy, files mapped into memory and memory shared with other processes."""
    path = tmp_path_factory.mktemp("data") / "array"
    np.arange(1024, dtype=np.float32).tofile(path)

    def step(context: Any) -> list[torch.Tensor]:
        w = torch.linspace(0, 1, 1024, requires_grad=True)
        array = torch.from_numpy(np.arange(1024, dtype=np.float32))
        mapped = torch.from_file(str(path), size=1024)
        shared = torch.arange(1024.0).share_memory_()
        with context():
            loss = (w * array).sum() + (w * mapped).sin().sum() + (w * shared).cos().sum()
            del array, mapped, shared
            loss.backward()
        return [w.grad]

    assert_same(step, session)


def test_statistics_and_arrays_that_change_without_notice(open_session, real_engine) -> None:
    """A normalisation moves its running statistics and NumPy fills a buffer, of which no version
    tells: backward sees what a buffer has now, wherever its bytes had gone meanwhile.
    """
    session = open_session(_engine=LazyEngine(real_engine))  # they wait to be written
    norm = torch.nn.BatchNorm1d(32)
    buffer = torch.zeros(16, 32)

    def step(context: Any) -> list[torch.Tensor]:
        norm.train().zero_grad()
        norm.reset_running_stats()
        x = rand(16, 32).requires_grad_()
        with context():
            buffer.numpy()[:] = 2
            first = (norm(x) * buffer).square().sum()
            buffer.numpy()[:] = 3
            second = (norm.eval()(x) * buffer).square().sum()
            second.backward()
            del first
        return [x.grad, *grads(norm)]

    assert_same(step, session)


def test_numpy_array_filled_again_between_graphs(session: Session) -> None:
    """A batch buffer written to by numpy, while an old loss is kept: no version tells of it."""
    w = torch.ones(256, requires_grad=True)
    array = np.zeros(256, dtype=np.float32)
    kept = []
    for i in range(4):
        array[:] = i
        w.grad = None
        with session.step():
            loss = (torch.from_numpy(array) * w).sum()
            kept.append((torch.from_numpy(array) * w).sum())
            loss.backward()
        assert torch.equal(w.grad, torch.full((256,), float(i)))
    kept.clear()


def test_one_storage_under_two_counters(session: Session) -> None:
    """``.data`` gives the same storage another version counter."""
    x = torch.full((256,), 2.0, requires_grad=True)
    with session.step():
        h = x * 1
        first = (h * h).sum()
        alias = h.data
        w = torch.ones(256, requires_grad=True)
        second = (alias * w).sum()
        alias.add_(1)  # seen by alias' counter only
        del h, alias
        with pytest.raises(RuntimeError, match="inplace"):
            second.backward()
        del first, second


def test_threads_with_steps_that_begin_and_end_at_any_time(session: Session) -> None:
    """Figures may mix, gradients may not."""
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for i in range(8):
                x = rand(128, seed=seed * 100 + i).requires_grad_()
                with session.step():
                    loss = chain(x * 1, 3)
                    if i % 2:
                        loss.backward()
                if not i % 2:
                    loss.backward()
                got, x.grad = x.grad, None
                chain(x * 1, 3).backward()
                assert torch.equal(got, x.grad)
        except BaseException as e:
            failures.append(e)

    in_threads(*(functools.partial(work, seed) for seed in range(4)))
    assert failures == []
    assert session.report().steps == 32


def test_graph_handed_to_another_thread_and_dropped_there(session: Session) -> None:
    with session.step():
        box = [chain(rand(256).requires_grad_(), 4)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    drain(session)
    assert session._hooks.live_blocks == 0


def test_exception_of_a_hook_in_backward(session: Session) -> None:
    """A tensor hook raises half way: what it left behind goes with the graph."""
    x = rand(256).requires_grad_()

    def bad(_: torch.Tensor) -> None:
        raise LookupError("hook")

    with session.step():
        h = (x * 1).sin()
        h.register_hook(bad)
        loss = chain(h, 4)
        with pytest.raises(LookupError, match="hook"):
            loss.backward()
        del h, loss
    chain(x, 2).backward()


def test_backward_inside_backward(session: Session) -> None:
    """A Function whose backward differentiates another graph of the same session."""

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x.sin().cos()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.enable_grad():
                y = x.detach().requires_grad_()
                return torch.autograd.grad(y.sin().cos(), y, g)[0]

    def step(context: Any) -> list[torch.Tensor]:
        x = rand(256).requires_grad_()
        with context():
            chain(Inner.apply(Inner.apply(x * 1)), 2).backward()
        return [x.grad]

    assert_same(step, session)


def test_deterministic_algorithms(session: Session) -> None:
    """The mode that fills fresh memory with NaNs."""

    torch.use_deterministic_algorithms(True)
    try:
        assert_same(train_net, session)
    finally:
        torch.use_deterministic_algorithms(False)


def test_nan_and_infinity(session: Session) -> None:
    def step(context: Any) -> list[torch.Tensor]:
        x = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45] * 64, requires_grad=True)
        with context():
            (x * 2).exp().sin().sum().backward()
        return [x.grad]

    assert_same(step, session)


def test_thousands_of_tiny_tensors(open_session, engine: str) -> None:
    """Far more blocks than pages of the window."""
    session = open_session(engine=engine, window_bytes=16384, prefetch_bytes=16384)

    def step(context: Any) -> list[torch.Tensor]:
        x = torch.ones(1, requires_grad=True)
        with context():
            h = x
            for _ in range(1500):
                h = h.sin()
            h.sum().backward()
        return [x.grad]

    assert_same(step, session)


def test_one_tensor_saved_a_thousand_times(session: Session) -> None:
    x = rand(64).requires_grad_()
    with session.step() as step:
        h = x * 1
        loss = sum((h * k).sin().sum() + (h * h).sum() for k in range(300))
        del h
        drain(session)
        loss.backward()
    assert step.report.offloaded_blocks == 301
    got, x.grad = x.grad, None
    h = x * 1
    sum((h * k).sin().sum() + (h * h).sum() for k in range(300)).backward()
    assert torch.equal(got, x.grad)


def test_session_made_and_closed_many_times(open_session, engine: str) -> None:
    for i in range(10):
        session = open_session(engine=engine)
        with session.step():
            chain(rand(64, seed=i).requires_grad_(), 2).backward()
        session.close()


def test_default_options_on_a_small_model(tmp_path: Any) -> None:
    """Nothing is large enough to leave, and that is fine."""
    with offload.Session(disk_dir=tmp_path) as session:
        assert_same(train_net, session)
        assert session.report().offloaded_blocks == 0
        assert session.report().kept_bytes["small"] > 0
