"""Training on the simulated accelerator with its activations elsewhere: the same bits, no race."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import simdev
import torch
from offloading import CONFIGURATIONS, session_on_sim, train
from torch import Tensor, nn

from offload.tensors.live import is_parameter_like
from tests.support import assert_identical, drain

SEEDS = range(50)


def transformer(width: int = 64, layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


@pytest.fixture(scope="module")
def expected() -> list[Tensor]:
    """What the CPU computes."""
    return train(transformer(), "cpu", contextlib.nullcontext)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_scheduler(scheduler, name, expected, tmp_path: Path) -> None:
    with session_on_sim(str(tmp_path), **CONFIGURATIONS[name]) as session:
        got = train(transformer(), "sim", session.step)
        report = session.report()
    assert_identical(expected, got)
    assert report.offloaded_bytes > 1 << 20
    assert report.reloaded_bytes > report.offloaded_bytes // 2
    assert (report.written_bytes > 0) == ("disk" in name)
    assert simdev.races() == []


def test_small_storages_cross_in_bundles(scheduler, tmp_path: Path) -> None:
    """Gathered by the stream that computes, written to the disk in part, and back in order."""

    def gradient(device: str, step: Any) -> list[Tensor]:
        x = torch.linspace(-2, 2, 250).to(device).requires_grad_()
        for _ in range(2):
            with step():
                y = x
                for _ in range(200):
                    y = y.sin()
                y.sum().backward()
        assert x.grad is not None
        return [x.grad.cpu()]

    options = {"bundle_bytes": 16 << 10, "host_budget": 32 << 10}
    with session_on_sim(str(tmp_path), **options) as session:
        got = gradient("sim", session.step)
        report = session.report()
    assert_identical(gradient("cpu", contextlib.nullcontext), got)
    assert report.offloaded_blocks == 2 * 12  # of sixteen members each, at 1,024 bytes
    assert report.offloaded_bytes == 2 * 12 * (16 << 10)
    assert report.written_bytes > 0
    assert simdev.races() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_random_orders(seed: int, expected, tmp_path: Path) -> None:
    simdev.configure(scheduler=simdev.Scheduler.RANDOM, seed=seed)
    options = list(CONFIGURATIONS.values())[seed % len(CONFIGURATIONS)]
    with session_on_sim(str(tmp_path), **options) as session:
        assert_identical(expected, train(transformer(), "sim", session.step, steps=2))
    assert simdev.races() == []


def test_copies_that_lag_behind(expected, tmp_path: Path) -> None:
    """Threads and a slow link, in real time."""
    simdev.configure(
        scheduler=simdev.Scheduler.THREADS, sleep_scale=1.0, d2h_bytes_per_s=1e9,
        h2d_bytes_per_s=1e9,
    )  # fmt: skip
    with session_on_sim(str(tmp_path), **CONFIGURATIONS["host+disk"]) as session:
        assert_identical(expected, train(transformer(), "sim", session.step))


def test_each_storage_crosses_once(tmp_path: Path) -> None:
    """What goes over the link is every saved storage once, and comes back once."""
    simdev.configure(scheduler=simdev.Scheduler.LAZY)
    model = transformer().to("sim")
    x = torch.randn(4, 16, 64).to("sim")
    storages: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if not is_parameter_like(tensor):
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = model(x).square().mean()  # the graph keeps them all: no address is used twice
    with session_on_sim(str(tmp_path)) as session:
        before = simdev.stats()
        with session.step() as step:
            loss = model(x).square().mean()
        assert simdev.stats().d2h.nbytes - before.d2h.nbytes == sum(storages.values())
        torch.accelerator.synchronize()
        drain(session)  # what is still on its way out would be handed back, and cross once only
        loss.backward()
        there = x.nbytes  # the caller has it: it is never fetched
        assert simdev.stats().h2d.nbytes - before.h2d.nbytes == sum(storages.values()) - there
        assert step.report.reloaded_bytes == step.report.offloaded_bytes - there
    del kept


def test_the_host_never_waits_in_the_host_tier(tmp_path: Path) -> None:
    """From the first operator of a step to the last, nothing synchronises."""
    simdev.configure(scheduler=simdev.Scheduler.LAZY)
    model = transformer().to("sim")
    x = torch.randn(4, 16, 64).to("sim")
    with session_on_sim(str(tmp_path)) as session:
        for _ in range(2):
            before = simdev.stats().syncs
            with session.step():
                model(x).square().mean().backward()
            assert simdev.stats().syncs == before
            torch.accelerator.synchronize()


def test_pinned_memory_stays_within_the_host_budget(tmp_path: Path) -> None:
    budget = 64 << 10
    with session_on_sim(str(tmp_path), host_budget=budget) as session:
        train(transformer(), "sim", session.step)
        assert 0 < simdev.stats().pinned.peak_bytes <= budget
        assert session.report().peak_arena_bytes <= budget


def test_the_device_holds_less(tmp_path: Path) -> None:
    """Peak device memory over the model falls by most of the activations."""

    def peak(step: Any) -> int:
        model = transformer(layers=8).to("sim")
        x = torch.randn(16, 32, 64).to("sim")
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        base = torch.accelerator.memory_allocated()
        with step():
            loss = model(x).square().mean()
            after_forward = torch.accelerator.memory_allocated()
            loss.backward()
        return after_forward - base

    plain = peak(contextlib.nullcontext)
    windows = {"window_bytes": 256 << 10, "prefetch_bytes": 256 << 10}
    with session_on_sim(str(tmp_path), **windows) as session:
        ours = peak(session.step)
    assert ours < plain / 5
