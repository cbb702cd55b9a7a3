"""Sessions that end while something is on its way or waits: nothing races, nothing stays pinned."""

import gc
from pathlib import Path
from typing import Any

import pytest
import simdev
import torch
from offloading import CONFIGURATIONS, SMALL_WINDOWS, open_engine

import offload
from tests.conftest import wait_until
from tests.doubles import LazyEngine
from tests.support import chain, drain


def opened(directory: Path, **options: Any) -> offload.Session:
    """A session that nobody closes."""
    return offload.Session(
        device="sim", disk_dir=directory, min_offload_bytes=0, keep_last_bytes=0,
        **{"_engine": open_engine(str(directory)), **SMALL_WINDOWS, **options},
    )  # fmt: skip


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("keeps_graph", [False, True])
def test_session_merely_dropped(scheduler, name: str, keeps_graph: bool, tmp_path: Path) -> None:
    """Its copies out are seen out before their sources and slots are used again."""
    x = torch.linspace(0, 1, 1024, device="sim").requires_grad_()
    session = opened(tmp_path, **CONFIGURATIONS[name])
    with session.step():
        loss = chain(x, 6)
    if keeps_graph:
        del session
        loss.backward()
        assert x.grad is not None
    del loss
    session = None
    gc.collect()
    assert simdev.stats().pinned.current_bytes == 0
    torch.full((6, 1024), 3.0, device="sim")
    torch.accelerator.synchronize()
    assert simdev.races() == []


@pytest.mark.parametrize("is_held", [False, True])
def test_graph_that_outlives_the_closed_session(scheduler, is_held: bool, tmp_path: Path) -> None:
    """What was pinned for it is unpinned when its backward has run."""
    x = torch.linspace(0, 1, 1024, device="sim").requires_grad_()
    with opened(tmp_path) as session, session.step():
        loss = chain(x, 6)
    if not is_held:
        del session
    loss.backward()
    del loss
    gc.collect()
    wait_until(lambda: simdev.stats().pinned.current_bytes == 0)  # autograd's thread does it
    assert simdev.stats().pinned.current_bytes == 0
    expected, x.grad = x.grad, None
    chain(x, 6).backward()
    assert torch.equal(expected, x.grad)


def test_values_with_a_conjugate_or_negative_bit(scheduler, tmp_path: Path) -> None:
    """Such tensors are views of other values than their bytes; they come back the same."""
    z = torch.complex(torch.arange(8.0), torch.ones(8)).to("sim").requires_grad_()
    w = torch.linspace(0, 1, 8, device="sim").requires_grad_()

    def gradients() -> list[torch.Tensor]:
        h = (z * 2).conj()
        return list(torch.autograd.grad(((h * w).abs() + h.imag * w * w).sum(), (z, w)))

    expected = gradients()
    with opened(tmp_path) as session:
        with session.step() as step:
            got = gradients()
        assert step.report.offloaded_blocks > 0
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


@pytest.mark.parametrize("spilled", [False, True])
def test_guess_that_ends_with_its_step(scheduler, spilled: bool, tmp_path: Path) -> None:
    """Tensors brought back ahead and not asked for, as the backward stopped half way. The next step
    lets them go, whether the copy is still on its way or they are going to the disk meanwhile; the
    graph can still be used.
    """
    x = torch.linspace(0, 1, 1024, device="sim").requires_grad_()
    expected = torch.autograd.grad(chain(x, 4), x)[0]
    stopped = []

    def stop_once(_: torch.Tensor) -> None:
        if not stopped:
            stopped.append(1)
            raise LookupError("stop")

    engine = LazyEngine(open_engine(str(tmp_path)), reads=False)
    with opened(tmp_path, _engine=engine, **CONFIGURATIONS["host+disk"]) as session:
        with session.step() as step:
            h = x.sin().sin().sin().sin()
            h.register_hook(stop_once)
            loss = chain(h, 4)
            torch.accelerator.synchronize()
            with pytest.raises(LookupError, match="stop"):
                loss.backward(retain_graph=True)
            assert step.report.reloaded_bytes >= 5 * 4096
            others = chain(x, 4 if spilled else 1)
            if spilled:
                torch.accelerator.synchronize()
        assert (engine.in_flight_bytes > 0) == spilled
        with session.step():
            assert torch.equal(torch.autograd.grad(h.sum(), x)[0], expected)
        del h, others, loss


def test_retained_graph_does_not_fill_the_device_again(scheduler, tmp_path: Path) -> None:
    """What one backward was given is not held for the next."""
    x = torch.linspace(0, 1, 1 << 14, device="sim").requires_grad_()
    with opened(tmp_path) as session:
        with session.step():
            loss = chain(x, 8)
        drain(session)
        before = torch.accelerator.memory_allocated()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x, retain_graph=True)
        drain(session)
        assert torch.accelerator.memory_allocated() <= before + first.nbytes + second.nbytes
        assert torch.equal(first, second)
