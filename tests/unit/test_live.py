"""Bytes of saved storages are counted once, for exactly as long as they live."""

import gc
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import offload
from offload.measure import activation_meter
from offload.tensors.live import LiveBytes, LiveBytesMeter, is_parameter_like, storage_of
from offload.units import KIB
from offload.workloads import preset
from tests.support import in_threads


def kib(count: int = 1) -> Tensor:
    return torch.zeros(count * KIB, dtype=torch.uint8)


class TestLiveBytes:
    def test_counts_until_death(self) -> None:
        live = LiveBytes()
        a, b = kib(1), kib(2)
        assert live.track(a.untyped_storage()) and live.track(b.untyped_storage())
        assert live.alive_bytes == 3 * KIB
        del a
        assert live.alive_bytes == 2 * KIB
        del b
        assert (live.alive_bytes, live.peak_bytes) == (0, 3 * KIB)

    def test_views_share_one_count(self) -> None:
        live = LiveBytes()
        whole = kib(4)
        assert live.track(whole[KIB:].untyped_storage())
        assert not live.track(whole.view(4, KIB)[1].untyped_storage())
        view = whole[:1]
        del whole
        assert live.alive_bytes == 4 * KIB  # a view of one byte keeps all of them
        del view
        assert live.alive_bytes == 0

    def test_a_reused_address_is_a_new_storage(self) -> None:
        live = LiveBytes()
        addresses = set()
        for _ in range(100):
            tensor = kib()
            addresses.add(tensor.untyped_storage()._cdata)
            assert live.track(tensor.untyped_storage())
            del tensor
        assert len(addresses) < 100, "no address came twice: this test shows nothing"
        assert (live.alive_bytes, live.peak_bytes) == (0, KIB)

    def test_exclude_before_and_after(self) -> None:
        live = LiveBytes()
        a, b, c = kib(), kib(), kib()
        live.exclude(a.untyped_storage())
        assert not live.track(a.untyped_storage())
        assert live.track(b.untyped_storage()) and live.track(c.untyped_storage())
        live.exclude(b.untyped_storage())
        live.exclude(c.untyped_storage(), unless_counted=True)
        assert live.alive_bytes == KIB
        del a, b, c
        assert live.alive_bytes == 0

    def test_death_inside_the_collector(self) -> None:
        live = LiveBytes()
        tensor = kib()
        live.track(tensor.untyped_storage())
        circle: list[object] = [tensor]
        circle.append(circle)
        del tensor, circle
        gc.collect()
        assert live.alive_bytes == 0

    def test_storage_that_only_autograd_holds(self) -> None:
        live = LiveBytes()
        x = torch.ones(KIB, requires_grad=True)
        y = x.exp()
        live.track(y.untyped_storage())
        loss = y.sum()
        del y
        assert live.alive_bytes == 4 * KIB
        loss.backward()
        assert live.alive_bytes == 0

    def test_many_threads(self) -> None:
        live = LiveBytes()
        kept: list[Tensor] = []

        def work() -> None:
            for _ in range(500):
                tensor = kib()
                live.track(tensor.untyped_storage())
            kept.append(tensor)

        in_threads(*[work] * 4)
        assert live.alive_bytes == 4 * KIB
        kept.clear()
        assert live.alive_bytes == 0
        assert live.peak_bytes <= 8 * KIB  # each thread has its newest and the one it replaces


def test_parameters_and_their_views() -> None:
    linear = torch.nn.Linear(3, 3)
    assert is_parameter_like(linear.weight) and is_parameter_like(linear.weight.t())
    assert not is_parameter_like(linear.weight * 1) and not is_parameter_like(torch.zeros(1))


def test_tensors_without_bytes_of_their_own() -> None:
    assert storage_of(torch.zeros(2, 2).to_sparse()) is None
    assert storage_of(torch.zeros(2, device="meta")) is None
    assert storage_of(torch.zeros(2)) is not None


def chain(x: Tensor, depth: int = 4) -> Tensor:
    """Saves one result of 4 KiB per step: exp keeps its output."""
    for _ in range(depth):
        x = (x * 0.1).exp()
    return x.sum()


def ones() -> Tensor:
    return torch.ones(KIB, requires_grad=True)  # 4 KiB


class TestMeter:
    def test_plain(self) -> None:
        with LiveBytesMeter() as meter:
            loss = chain(ones())
        assert meter.alive_bytes == 4 * 4 * KIB
        loss.backward()
        assert (meter.alive_bytes, meter.peak_bytes) == (0, 4 * 4 * KIB)

    def test_an_output_saved_by_its_own_node_does_not_leak(self) -> None:
        with LiveBytesMeter() as meter:
            y = ones().exp()
        del y  # never backward: a kept argument of pack would be a cycle through C++
        gc.collect()
        assert meter.alive_bytes == 0

    @pytest.mark.parametrize(
        "hooks", [save_on_cpu, lambda: saved_tensors_hooks(torch.clone, _same)]
    )
    def test_gradients_pass_through_other_hooks(self, hooks: type[saved_tensors_hooks]) -> None:
        expected, x = ones(), ones()
        chain(expected).backward()
        with hooks(), LiveBytesMeter() as meter:
            loss = chain(x)
        loss.backward()
        assert x.grad is not None and expected.grad is not None
        assert torch.equal(x.grad, expected.grad)
        assert meter.peak_bytes > 0 and meter.alive_bytes == 0

    def test_hooks_that_drop_the_tensor_lower_the_peak(self) -> None:
        files: list[list[float]] = []

        def pack(tensor: Tensor) -> int:
            files.append(tensor.tolist())
            return len(files) - 1

        with saved_tensors_hooks(pack, lambda i: torch.tensor(files[i])), LiveBytesMeter() as meter:
            loss = chain(ones())
        assert meter.alive_bytes == 0
        loss.backward()
        assert meter.peak_bytes <= 2 * 4 * KIB  # one at a time, and its successor

    def test_outside_a_checkpoint_it_sees_the_boundary_only(self) -> None:
        with LiveBytesMeter() as meter:
            loss = checkpoint(chain, ones() * 1, use_reentrant=False)
        loss.backward()
        assert meter.peak_bytes == 4 * KIB

    def test_inside_a_checkpoint_it_sees_recomputed_saves(self) -> None:
        seen: list[int] = []
        meter = LiveBytesMeter(observer=seen.append)

        def metered(x: Tensor) -> Tensor:
            with meter:
                return chain(x)

        x, expected = ones(), ones()
        chain(expected * 1).backward()
        loss = checkpoint(metered, x * 1, use_reentrant=False)
        assert meter.alive_bytes == 0  # dropped by checkpoint
        seen.clear()
        loss.backward()
        assert max(seen) >= 4 * 4 * KIB
        assert meter.alive_bytes == 0
        assert x.grad is not None and expected.grad is not None
        assert torch.equal(x.grad, expected.grad)

    def test_extra_bytes_stand_for_restored_storages(self) -> None:
        arena = {"used": 0}

        def pack(tensor: Tensor) -> list[float]:
            return tensor.tolist()

        def unpack(values: list[float]) -> Tensor:
            arena["used"] = 4 * KIB
            return torch.tensor(values)

        seen: list[int] = []
        meter = LiveBytesMeter(extra_bytes=lambda: arena["used"], observer=seen.append)
        with saved_tensors_hooks(pack, unpack), meter:
            loss = ones().exp().sum()
        seen.clear()
        loss.backward()
        assert max(seen) == 4 * KIB  # and not the slot and the tensor over it

    def test_parameters_and_excluded_tensors_do_not_count(self) -> None:
        linear, scale = torch.nn.Linear(64, 64), torch.ones(64)
        meter = LiveBytesMeter(exclude=[scale])
        with meter:
            loss = (linear(torch.ones(1, 64)) * scale).sum()
        assert meter.alive_bytes == 64 * 4  # the input of the linear layer, and nothing else
        loss.backward()

    def test_may_be_nested_and_leaves_the_stack_as_it_was(self) -> None:
        meter = LiveBytesMeter()
        with meter, meter:
            loss = chain(ones())
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert meter.alive_bytes == 4 * 4 * KIB
        loss.backward()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def test_what_a_session_reports_is_what_the_meter_sees() -> None:
    workload = preset("gpt-tiny")
    model = workload.build(seed=0)
    (batch,) = workload.batches(1, seed=0)
    options = {"min_offload_bytes": 4 * KIB, "window_bytes": "256KiB", "prefetch_bytes": "256KiB"}
    with offload.Session(**options, keep_last_bytes=0, engine="aio") as session:
        meter = activation_meter(model, session, inputs=batch)
        with session.step() as step:
            with meter:
                loss = workload.step(model, batch)
            loss.backward()
        report = step.report
    small_bytes = report.kept_bytes.get("small", 0)
    assert report.peak_live_bytes > 0
    assert meter.peak_bytes <= report.peak_live_bytes + small_bytes
    plain = activation_meter(model, inputs=batch)
    with plain:
        loss = workload.step(model, batch)
    loss.backward()
    assert meter.peak_bytes < 0.6 * plain.peak_bytes


def test_meter_counts_each_checkpointed_block_of_a_model() -> None:
    workload = preset("gpt-tiny")
    model = workload.build(seed=0)
    (batch,) = workload.batches(1, seed=0)
    peaks = []
    for wrapped in (False, True):
        meter = activation_meter(model, inputs=batch)
        if wrapped:
            model.wrap_block = lambda block, meter=meter: partial(
                checkpoint, _metered, meter, block, use_reentrant=False
            )
        with meter:
            loss = workload.step(model, batch)
        loss.backward()
        assert meter.alive_bytes == 0
        peaks.append(meter.peak_bytes)
    assert peaks[1] < peaks[0]


def _metered(meter: LiveBytesMeter, block: torch.nn.Module, x: Tensor) -> Tensor:
    with meter:
        return block(x)
