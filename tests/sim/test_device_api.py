"""Streams, events, memory and copies as torch offers them for accelerators, on the simulated one
under every scheduler.
"""

import mmap
import threading

import pytest
import simdev
import torch
from simdev import Direction, Scheduler
from torch import Tensor

from offload.units import MIB

accelerator = torch.accelerator

pytestmark = pytest.mark.usefixtures("scheduler")


def randn(*size: int, **options) -> Tensor:
    return torch.randn(*size, device="sim", **options)


def tasks_run() -> int:
    return simdev.stats().tasks_run


# --- torch.accelerator


def test_there_is_one_accelerator():
    assert accelerator.current_accelerator() == torch.device("sim")
    assert accelerator.is_available()
    assert accelerator.device_count() == 1
    assert accelerator.current_device_index() == 0
    accelerator.set_device_index(0)
    with accelerator.device_index(0):
        assert accelerator.current_device_index() == 0


def test_capability_lists_dtypes():
    assert torch.bfloat16 in accelerator.get_device_capability()["supported_dtypes"]


def test_set_stream():
    before, stream = accelerator.current_stream(), torch.Stream("sim")
    accelerator.set_stream(stream)
    assert accelerator.current_stream() == stream
    accelerator.set_stream(before)
    accelerator.synchronize()
    assert simdev.stats().syncs.device == 1


def test_memory_statistics():
    before = accelerator.memory_allocated()
    x = torch.empty(MIB, device="sim")
    assert accelerator.memory_allocated() - before == 4 * MIB
    del x
    assert accelerator.memory_allocated() == before
    assert accelerator.max_memory_allocated() - before == 4 * MIB
    assert accelerator.memory_reserved() >= 4 * MIB
    accelerator.empty_cache()
    assert accelerator.memory_reserved() == before
    accelerator.reset_peak_memory_stats()
    accelerator.reset_accumulated_memory_stats()
    assert accelerator.max_memory_allocated() == before
    assert accelerator.memory_stats()["allocated_bytes.all.current"] == before


def test_memory_info_follows_the_capacity():
    simdev.configure(capacity_bytes=64 * MIB)
    _, total_bytes = accelerator.get_memory_info()
    assert total_bytes == 64 * MIB


def test_out_of_memory():
    simdev.configure(capacity_bytes=accelerator.memory_reserved() + MIB)
    kept = torch.empty(MIB // 2, dtype=torch.uint8, device="sim")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1048576 bytes"):
        torch.empty(MIB, dtype=torch.uint8, device="sim")
    del kept
    torch.empty(MIB, dtype=torch.uint8, device="sim")  # what is cached makes room


def test_memory_in_use_by_another_stream_makes_room_once_that_is_done():
    simdev.configure(capacity_bytes=accelerator.memory_reserved() + MIB)
    side = torch.Stream("sim")
    x = torch.empty(MIB, dtype=torch.uint8, device="sim")
    x.record_stream(side)
    del x
    torch.empty(MIB // 2, dtype=torch.uint8, device="sim")


# --- streams and events


def test_stream_methods():
    stream = torch.Stream("sim")
    accelerator.current_stream().wait_event(stream.record_event())
    stream.wait_stream(accelerator.current_stream())
    stream.synchronize()
    assert stream.query()
    assert stream.device == torch.device("sim", 0)
    assert stream.native_handle == stream.stream_id
    with stream:
        assert accelerator.current_stream() == stream
    assert accelerator.current_stream() != stream


def test_streams_of_a_priority_or_of_the_default_device():
    assert torch.Stream("sim", priority=-1).device == torch.Stream().device


def test_event_methods():
    begin, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    begin.record()
    randn(100) @ randn(100)
    end.record()
    end.synchronize()
    end.wait()
    assert begin.query()
    assert begin.elapsed_time(end) > 0


def test_a_wait_is_for_the_version_that_was_recorded_before():
    simdev.configure(scheduler=Scheduler.LAZY)
    recorder, waiter = torch.Stream("sim"), torch.Stream("sim")
    event = torch.Event("sim")
    event.record(recorder)
    waiter.wait_event(event)
    with recorder:
        randn(10)
    event.record(recorder)
    before = tasks_run()
    waiter.synchronize()
    assert tasks_run() - before == 2  # the first record and the wait, nothing after them


def test_polling_an_event_comes_to_an_end():
    event = torch.Event("sim")
    x = randn(100)
    x = x + 1
    event.record()
    for _ in range(10_000_000):
        if event.query():
            return
    pytest.fail("the event is never done")


def test_threads_share_the_device():
    results: dict[int, Tensor] = {}
    begin = threading.Barrier(4)

    def work(i: int) -> None:
        begin.wait()
        compute, copy = torch.Stream("sim"), torch.Stream("sim")
        host = torch.zeros(64, pin_memory=True)
        for _ in range(20):
            with compute:
                x = torch.full((64,), float(i), device="sim") * 2
            copy.wait_stream(compute)
            with copy:
                host.copy_(x, non_blocking=True)
            x.record_stream(copy)
        copy.synchronize()
        results[i] = host.clone()

    threads = [threading.Thread(target=work, args=[i]) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {i: host.unique().item() for i, host in results.items()} == {0: 0, 1: 2, 2: 4, 3: 6}


def test_record_stream():
    randn(5).record_stream(torch.Stream("sim"))


def test_backward_runs_on_the_stream_of_the_forward():
    side = torch.Stream("sim")
    x = randn(64, 64, requires_grad=True)
    side.wait_stream(accelerator.current_stream())
    with side:
        y = (x @ x).relu().sum()
    accelerator.current_stream().wait_stream(side)
    y.backward()
    expected = x.detach().cpu().requires_grad_()
    (expected @ expected).relu().sum().backward()
    assert torch.allclose(x.grad.cpu(), expected.grad, atol=1e-4)
    x.record_stream(side)
    y.record_stream(accelerator.current_stream())


def test_backward_calls_python_on_a_thread_of_the_device():
    seen = []

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            seen.append((threading.get_ident(), accelerator.current_stream()))
            return grad * 2

    side = torch.Stream("sim")
    x = randn(3, requires_grad=True)
    side.wait_stream(accelerator.current_stream())
    with side:
        y = Double.apply(x).sum()
    accelerator.current_stream().wait_stream(side)
    y.backward()
    ((thread, stream),) = seen
    assert thread != threading.get_ident()
    assert stream == side


# --- pinned memory


def test_pinned_memory():
    for pinned in (torch.randn(5).pin_memory(), torch.zeros(3, pin_memory=True)):
        assert pinned.is_pinned()
        assert pinned[2:].is_pinned()
        assert pinned.untyped_storage().is_pinned()
    assert not torch.randn(5).is_pinned()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.empty(3, device="sim", pin_memory=True)


def test_pinned_bytes_are_counted():
    before = simdev.stats().pinned.current_bytes
    x = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    y = torch.empty(MIB, dtype=torch.uint8, pin_memory=True)
    assert simdev.stats().pinned.current_bytes - before == 2 * MIB
    del x, y
    accelerator.empty_host_cache()
    pinned = simdev.stats().pinned
    assert (pinned.current_bytes - before, pinned.peak_bytes - before) == (0, 2 * MIB)


def test_registered_memory_is_pinned_and_copies_to_it_do_not_wait():
    simdev.configure(scheduler=Scheduler.LAZY)
    before = simdev.stats().pinned.current_bytes
    slab = mmap.mmap(-1, MIB)
    host = torch.frombuffer(slab, dtype=torch.uint8)
    assert not host.is_pinned()
    simdev.host_register(host.data_ptr(), MIB)
    assert host.is_pinned()
    assert host[5000:].is_pinned()
    assert simdev.stats().pinned.current_bytes - before == MIB

    x = torch.full((MIB,), 7, dtype=torch.uint8, device="sim")
    host.copy_(x, non_blocking=True)
    assert simdev.stats().syncs.total == 0
    assert host.sum() == 0
    accelerator.synchronize()
    assert (host == 7).all()

    simdev.host_unregister(host.data_ptr())
    assert not host.is_pinned()
    assert simdev.stats().pinned.current_bytes == before


def test_registrations_are_checked():
    slab = mmap.mmap(-1, MIB)
    address = torch.frombuffer(slab, dtype=torch.uint8).data_ptr()
    with pytest.raises(ValueError, match="not a multiple of a page"):
        simdev.host_register(address + 1, 4096)
    with pytest.raises(ValueError, match="empty or overlap"):
        simdev.host_register(address, 0)
    simdev.host_register(address + 4096, 4096)
    for begin in (address, address + 4096):
        with pytest.raises(ValueError, match="empty or overlap"):
            simdev.host_register(begin, 8192)
    with pytest.raises(ValueError, match="nothing is registered"):
        simdev.host_unregister(address)
    simdev.host_unregister(address + 4096)


def test_a_pinned_tensor_can_go_while_its_copy_is_pending():
    simdev.configure(scheduler=Scheduler.LAZY)
    host = torch.arange(1000.0).pin_memory()
    x = host.to("sim", non_blocking=True)
    del host
    torch.full((1000,), 3.0, pin_memory=True)
    assert torch.equal(x.cpu(), torch.arange(1000.0))


# --- copies


def test_copies_convert_broadcast_and_transpose():
    host = torch.randn(4, 6).pin_memory()
    x = host.to("sim", non_blocking=True)
    assert torch.equal(x.cpu(), host)
    y = torch.empty(6, 4, dtype=torch.float64, device="sim")
    y.copy_(host.t())
    assert torch.equal(y.cpu().float(), host.t())
    y.copy_(torch.ones(4))
    assert y.sum().item() == 24
    back = torch.empty(6, 4, pin_memory=True).t()
    back.copy_(x, non_blocking=True)
    accelerator.synchronize()
    assert torch.equal(back, host)


@pytest.mark.parametrize("direction", Direction)
def test_an_injected_fault_is_reported_when_the_host_waits(direction):
    host, x = torch.zeros(10, pin_memory=True), torch.ones(10, device="sim")
    accelerator.synchronize()
    simdev.inject_copy_fault(direction, nth=2)
    target, source = (host, x) if direction is Direction.D2H else (x, host)
    target.copy_(source, non_blocking=True)
    accelerator.synchronize()
    target.copy_(source, non_blocking=True)
    with pytest.raises(RuntimeError, match=f"copy {direction.name}: injected fault"):
        accelerator.synchronize()
    accelerator.synchronize()  # it is reported once


def test_counters():
    host = torch.zeros(256, pin_memory=True)
    x = host.to("sim", non_blocking=True)
    host.copy_(x, non_blocking=True)
    assert simdev.stats().syncs.total == 0
    x.cpu()
    x[0].item()
    x.nonzero()
    torch.Stream("sim").synchronize()
    torch.Stream("sim").record_event().synchronize()
    accelerator.synchronize()
    stats = simdev.stats()
    assert stats.syncs == simdev.HostSyncs(stream=1, event=1, device=1, copy=1, item=1, operator=1)
    assert stats.h2d == simdev.Copies(count=1, nbytes=1024)
    assert stats.d2h == simdev.Copies(count=3, nbytes=1024 + 1024 + 4)
    assert set(stats.sync_operators) == {"aten::nonzero"}
