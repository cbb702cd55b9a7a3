"""Virtual time is what arithmetic says, under every scheduler, and does not depend on the machine.

The speeds are round: 1 byte takes 1 ns from the device, half of that to the device and in device
memory a tenth.
"""

import functools
import threading
import time
from collections.abc import Callable

import pytest
import simdev
import torch
from simdev import Scheduler

NBYTES = 10_000
LAUNCH_NS = 1_000
LATENCY_NS = 500
MIN_KERNEL_NS = 100

accelerator = torch.accelerator


@pytest.fixture(autouse=True)
def _speeds(scheduler: Scheduler) -> None:
    simdev.configure(
        d2h_bytes_per_s=1e9,
        h2d_bytes_per_s=2e9,
        hbm_bytes_per_s=10e9,
        flops_per_s=1e12,
        launch_ns=LAUNCH_NS,
        copy_latency_ns=LATENCY_NS,
        min_kernel_ns=MIN_KERNEL_NS,
    )


@pytest.fixture
def x() -> torch.Tensor:
    return torch.zeros(NBYTES, dtype=torch.uint8, device="sim")


@pytest.fixture
def host() -> torch.Tensor:
    return torch.zeros(NBYTES, dtype=torch.uint8, pin_memory=True)


def duration_ns(program: Callable[[], object]) -> int:
    """From a device at rest until all is done."""
    accelerator.synchronize()
    begin_ns = simdev.virtual_time_ns()
    assert simdev.host_virtual_time_ns() == begin_ns
    program()
    return simdev.virtual_time_ns() - begin_ns


def side(program: Callable[[], object]) -> torch.Stream:
    """Run ``program`` on a stream that waits for the current one."""
    stream = torch.Stream("sim")
    stream.wait_stream(accelerator.current_stream())
    with stream:
        program()
    return stream


def test_a_copy_out(x, host):
    assert duration_ns(lambda: host.copy_(x, non_blocking=True)) == 1_000 + 500 + 10_000


def test_a_copy_in(x, host):
    assert duration_ns(lambda: x.copy_(host, non_blocking=True)) == 1_000 + 500 + 5_000


def test_one_direction_carries_one_copy_at_a_time(x, host):
    other = torch.zeros(NBYTES, dtype=torch.uint8, pin_memory=True)

    def program() -> None:
        side(lambda: host.copy_(x, non_blocking=True))
        side(lambda: other.copy_(x, non_blocking=True))

    assert duration_ns(program) == 1_000 + 10_500 + 10_500


def test_both_directions_work_at_once(x, host):
    y, other = torch.empty_like(x), torch.zeros(NBYTES, dtype=torch.uint8, pin_memory=True)

    def program() -> None:
        side(lambda: host.copy_(x, non_blocking=True))
        side(lambda: y.copy_(other, non_blocking=True))

    assert duration_ns(program) == 1_000 + 10_500
    accelerator.synchronize()  # before y goes


def test_a_kernel_takes_the_time_of_its_bytes(x):
    assert duration_ns(lambda: x + 1) == 1_000 + 2_000  # reads and writes 10,000 bytes each


def test_a_kernel_takes_the_time_of_its_products():
    a, b = torch.zeros(100, 200, device="sim"), torch.zeros(200, 300, device="sim")
    expected_ns = 2 * 100 * 200 * 300 / 1e12 * 1e9
    simdev.configure(hbm_bytes_per_s=1e15)
    assert duration_ns(lambda: a @ b) == 1_000 + expected_ns


def test_a_small_kernel_takes_the_least_time():
    x = torch.zeros(4, device="sim")
    assert duration_ns(lambda: x + 1) == 1_000 + 100


def test_a_stream_is_serial(x, host):
    def program() -> None:
        y = x + 1
        host.copy_(y, non_blocking=True)

    assert duration_ns(program) == 1_000 + 2_000 + 10_500


def test_a_copy_hides_behind_kernels(x, host):
    def program() -> None:
        side(lambda: host.copy_(x, non_blocking=True))
        for _ in range(10):
            x + 1

    assert duration_ns(program) == 1_000 + 1_000 + 10 * 2_000


def test_an_event_delays_who_waits_for_it(x, host):
    def program() -> None:
        stream = side(lambda: host.copy_(x, non_blocking=True))
        accelerator.current_stream().wait_stream(stream)
        x + 1

    assert duration_ns(program) == 1_000 + 10_500 + 2_000


def test_a_host_that_waits_launches_late(x, host):
    def program() -> None:
        host.copy_(x)
        x + 1

    assert duration_ns(program) == (1_000 + 10_500) + (1_000 + 2_000)


def test_a_busy_host_launches_late(x):
    def program() -> None:
        simdev.advance_host_ns(7_000)
        x + 1

    assert duration_ns(program) == 7_000 + 1_000 + 2_000


def test_launches_bound_small_kernels():
    x = torch.zeros(4, device="sim")
    assert duration_ns(lambda: [x.neg() for _ in range(10)]) == 10 * 1_000 + 100


def test_events_tell_virtual_time(x):
    begin, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    accelerator.synchronize()
    begin.record()
    x + 1
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) == pytest.approx(0.003, abs=1e-9)


def test_queries_can_go_by_virtual_time(x, host):
    simdev.configure(timed_queries=True)
    accelerator.synchronize()
    host.copy_(x, non_blocking=True)
    done = accelerator.current_stream().record_event()
    simdev.advance_host_ns(LATENCY_NS + NBYTES - 600)
    assert not done.query()  # 600 ns too early, and itself takes 500
    assert not accelerator.current_stream().query()
    assert done.query()
    assert accelerator.current_stream().query()
    simdev.host_access(host.data_ptr(), host.nbytes, is_write=True)


def test_time_starts_again_with_each_reset(x):
    x + 1
    simdev.reset()
    assert (simdev.virtual_time_ns(), simdev.host_virtual_time_ns()) == (0, 0)
    event = torch.Event("sim")
    event.record()
    simdev.advance_host_ns(1_000)
    simdev.reset()
    event.synchronize()
    assert simdev.virtual_time_ns() == 0


def test_a_thread_with_its_own_clock_waits_alone(x, host):
    def wait(done: torch.Event) -> None:
        with simdev.own_host_clock():
            done.synchronize()
            simdev.host_release(1)

    def program(does_acquire: bool) -> None:
        stream = side(lambda: host.copy_(x, non_blocking=True))
        thread = threading.Thread(target=wait, args=[stream.record_event()])
        thread.start()
        thread.join()
        if does_acquire:
            simdev.host_acquire(1)
        x + 1

    assert duration_ns(lambda: program(False)) == 1_000 + 10_500
    assert duration_ns(lambda: program(True)) == (1_000 + 10_500) + (1_000 + 2_000)


@pytest.mark.parametrize("scheduler", [Scheduler.THREADS], indirect=True)
def test_tasks_of_threads_can_sleep(x):
    copies = [torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    simdev.configure(copy_latency_ns=100_000_000, sleep_scale=1)
    begin_ns = time.perf_counter_ns()
    for copy in copies:
        side(functools.partial(copy.copy_, x, non_blocking=True))
    accelerator.synchronize()
    assert time.perf_counter_ns() - begin_ns >= 200_000_000  # one link
