"""Programs that order their accesses are silent; those that forget to are found.

Each scenario is a program that copies or computes on two streams, in a good variant and a bad one
that leaves out one rule. The detector must tell them apart under every scheduler, even if nothing
goes wrong; random orders must produce a wrong value within a few seeds.
"""

import mmap
import threading
from collections.abc import Callable, Iterator

import pytest
import simdev
import torch
from simdev import Scheduler
from torch import Tensor

N = 4096
SEEDS = range(20)
VALUES = torch.arange(N, dtype=torch.float32)
RESULT = VALUES * 2 + 1

accelerator = torch.accelerator
Scenario = Callable[[bool], bool]


def access(host: Tensor, *, is_write: bool) -> None:
    simdev.host_access(host.data_ptr(), host.nbytes, is_write=is_write, what="disk")


def produce() -> Tensor:
    return VALUES.to("sim") * 2 + 1


# Each scenario returns whether its result is right.


def copy_out_waits_for_the_producer(good: bool) -> bool:
    main, side = accelerator.current_stream(), torch.Stream("sim")
    host = torch.zeros(N, pin_memory=True)
    x = VALUES.to("sim")
    y = x * 2 + 1
    if good:
        side.wait_event(main.record_event())
    with side:
        host.copy_(y, non_blocking=True)
    y.record_stream(side)
    side.synchronize()
    return torch.equal(host, RESULT)


def consumer_waits_for_the_copy_in(good: bool) -> bool:
    main, side = accelerator.current_stream(), torch.Stream("sim")
    host = VALUES.pin_memory()
    with side:
        x = torch.empty(N, device="sim")
        x.copy_(host, non_blocking=True)
    x.record_stream(main)
    if good:
        main.wait_stream(side)
    return torch.equal((x * 2 + 1).cpu(), RESULT)


def source_is_recorded_on_the_stream_that_copies_it(good: bool) -> bool:
    main, side = accelerator.current_stream(), torch.Stream("sim")
    host = torch.zeros(N, pin_memory=True)
    y = produce()
    side.wait_stream(main)
    with side:
        host.copy_(y, non_blocking=True)
    if good:
        y.record_stream(side)
    del y
    torch.full((N,), -7.0, device="sim")  # would get the memory of y
    main.synchronize()
    side.synchronize()
    return torch.equal(host, RESULT)


def target_is_recorded_on_the_stream_that_uses_it(good: bool) -> bool:
    main, side = accelerator.current_stream(), torch.Stream("sim")
    host, other = VALUES.pin_memory(), torch.zeros(N, pin_memory=True)
    with side:
        x = torch.empty(N, device="sim")
        x.copy_(host, non_blocking=True)
    main.wait_stream(side)
    y = x * 2 + 1
    if good:
        x.record_stream(main)
    del x
    with side:
        z = torch.empty(N, device="sim")  # would get the memory of x
        z.copy_(other, non_blocking=True)
    return torch.equal(y.cpu(), RESULT)


def host_waits_before_it_reads(good: bool) -> bool:
    main, side = accelerator.current_stream(), torch.Stream("sim")
    host = torch.zeros(N, pin_memory=True)
    y = produce()
    side.wait_stream(main)
    with side:
        host.copy_(y, non_blocking=True)
    y.record_stream(side)
    if good:
        side.record_event().synchronize()
    access(host, is_write=False)
    read = host.clone()
    return torch.equal(read, RESULT)


def host_waits_before_it_refills(good: bool) -> bool:
    main, side = accelerator.current_stream(), torch.Stream("sim")
    host = VALUES.pin_memory()
    with side:
        x = torch.empty(N, device="sim")
        x.copy_(host, non_blocking=True)
    x.record_stream(main)
    if good:
        side.synchronize()
    access(host, is_write=True)
    host.fill_(5.0)
    main.wait_stream(side)
    return torch.equal((x * 2 + 1).cpu(), RESULT)


def copy_in_waits_for_the_copy_out(good: bool) -> bool:
    out, back = torch.Stream("sim"), torch.Stream("sim")
    host = torch.zeros(N, pin_memory=True)
    y = produce()
    out.wait_stream(accelerator.current_stream())
    with out:
        host.copy_(y, non_blocking=True)
    y.record_stream(out)
    if good:
        back.wait_stream(out)
    with back:
        return torch.equal(host.to("sim", non_blocking=True).cpu(), RESULT)


SCENARIOS = [
    copy_out_waits_for_the_producer,
    consumer_waits_for_the_copy_in,
    source_is_recorded_on_the_stream_that_copies_it,
    target_is_recorded_on_the_stream_that_uses_it,
    host_waits_before_it_reads,
    host_waits_before_it_refills,
    copy_in_waits_for_the_copy_out,
]
scenarios = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)


def finish() -> list[str]:
    accelerator.synchronize()
    return simdev.races()


@scenarios
def test_good_programs_are_silent(scenario: Scenario, scheduler: Scheduler):
    assert scenario(True)
    assert finish() == []


@scenarios
def test_good_programs_are_right_in_any_order(scenario: Scenario):
    for seed in SEEDS:
        simdev.configure(scheduler=Scheduler.RANDOM, seed=seed)
        assert scenario(True), f"seed {seed}"
        assert finish() == []


@scenarios
def test_bad_programs_are_reported(scenario: Scenario, scheduler: Scheduler):
    scenario(False)
    assert finish() != []


@scenarios
def test_bad_programs_go_wrong_in_some_order(scenario: Scenario):
    wrong = []
    for seed in SEEDS:
        simdev.configure(scheduler=Scheduler.RANDOM, seed=seed)
        wrong.append(not scenario(False))
        assert finish() != []
    assert any(wrong)


@scenarios
def test_a_seed_repeats_the_order(scenario: Scenario):
    def run() -> list[bool]:
        results = []
        for seed in SEEDS:
            simdev.reset()
            simdev.configure(scheduler=Scheduler.RANDOM, seed=seed)
            results.append(scenario(False))
        finish()
        return results

    assert run() == run()


# --- Reports


def test_a_report_names_both_sides(scheduler: Scheduler):
    side = torch.Stream("sim")
    x = torch.ones(N, device="sim")
    with side:
        x.add_(1)
    x.record_stream(side)
    (first, *_) = finish()
    assert first.startswith("read after write: ")
    assert f"'aten::add.out' on stream {side.stream_id} is not ordered after" in first
    assert "'aten::fill_.Scalar' on stream 0" in first
    assert f"({4 * N} bytes at {x.data_ptr():#x})" in first


def test_reports_stay_until_they_are_cleared():
    host_waits_before_it_reads(False)
    accelerator.synchronize()
    reports = simdev.races(clear=False)
    assert reports != []
    assert simdev.races() == reports
    assert simdev.races() == []


def test_no_reports_when_switched_off():
    simdev.configure(detect_races=False)
    copy_out_waits_for_the_producer(False)
    assert finish() == []


def test_reads_do_not_race_with_each_other(scheduler: Scheduler):
    x = torch.ones(N, device="sim")
    sides = [torch.Stream("sim") for _ in range(3)]
    for side in sides:
        side.wait_stream(accelerator.current_stream())
        with side:
            x + 1
        x.record_stream(side)
    assert finish() == []


def test_parts_of_a_tensor_are_told_apart(scheduler: Scheduler):
    x = torch.ones(2, N, device="sim")
    side = torch.Stream("sim")
    side.wait_stream(accelerator.current_stream())
    x[0].add_(1)
    with side:
        x[1].add_(1)
    x.record_stream(side)
    assert finish() == []


def test_queries_that_succeed_count_as_waits(scheduler: Scheduler):
    host, x = torch.zeros(N, pin_memory=True), torch.ones(N, device="sim")
    host.copy_(x, non_blocking=True)
    done = accelerator.current_stream().record_event()
    while not done.query():
        pass
    access(host, is_write=True)
    assert finish() == []


def test_polls_of_an_allocator_do_not_count_as_waits():
    """A pinned block that comes back, because its copy is done, says nothing about another copy."""
    host, x = torch.zeros(N, pin_memory=True), torch.ones(N, device="sim")
    accelerator.synchronize()
    host.copy_(x, non_blocking=True)
    gone = torch.zeros(N, pin_memory=True)
    gone.copy_(x, non_blocking=True)
    del gone
    torch.zeros(N, pin_memory=True)  # polls
    access(host, is_write=False)
    assert len(finish()) == 1


def test_poison_is_what_freed_memory_holds(scheduler: Scheduler):
    assert torch.empty(N, device="sim").isnan().all().item()
    simdev.configure(poison=False)
    x = torch.ones(N, device="sim")
    del x
    assert (torch.empty(N, device="sim") == 1).all().item()


# --- Registered memory


@pytest.fixture
def slab() -> Iterator[Tensor]:
    """Memory that the test maps and the device knows."""
    host = torch.frombuffer(mmap.mmap(-1, 4 * N), dtype=torch.float32)
    simdev.host_register(host.data_ptr(), host.nbytes)
    yield host
    simdev.host_unregister(host.data_ptr())
    assert simdev.races() == []


def test_registered_memory_is_watched(slab: Tensor, scheduler: Scheduler):
    slab.copy_(torch.ones(N, device="sim"), non_blocking=True)
    access(slab, is_write=False)
    (report,) = finish()
    assert report.startswith("read after write: 'disk' on the host is not ordered after 'copy D2H'")


def test_memory_must_not_be_unregistered_in_flight(scheduler: Scheduler):
    host = torch.frombuffer(mmap.mmap(-1, 4 * N), dtype=torch.float32)
    simdev.host_register(host.data_ptr(), host.nbytes)
    host.copy_(torch.ones(N, device="sim"), non_blocking=True)
    simdev.host_unregister(host.data_ptr())
    (report,) = finish()
    assert "'host_unregister' on the host is not ordered after 'copy D2H'" in report


# --- Host clocks


def run_thread(target: Callable[[], None]) -> None:
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()


@pytest.mark.parametrize("tells", [True, False], ids=["told", "not told"])
@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
def test_a_thread_with_its_own_clock_must_tell_what_it_waited_for(own: bool, tells: bool):
    host, x = torch.zeros(N, pin_memory=True), torch.ones(N, device="sim")
    host.copy_(x, non_blocking=True)
    done = accelerator.current_stream().record_event()

    def wait() -> None:
        done.synchronize()
        if tells:
            simdev.host_release(1)

    def wait_alone() -> None:
        with simdev.own_host_clock():
            wait()

    run_thread(wait_alone if own else wait)
    simdev.host_acquire(1)
    access(host, is_write=True)
    assert (finish() == []) == (tells or not own)


def test_an_own_clock_begins_with_what_the_shared_one_knows():
    host, x = torch.zeros(N, pin_memory=True), torch.ones(N, device="sim")
    host.copy_(x)

    def read() -> None:
        with simdev.own_host_clock():
            access(host, is_write=False)

    run_thread(read)
    assert finish() == []
    access(host, is_write=True)  # the thread did not say that it has read
    assert len(finish()) == 1
