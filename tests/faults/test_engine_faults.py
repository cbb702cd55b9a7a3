"""The disk fails, lags or lies: training goes on with the right gradients, and says so."""

import errno
import gc
import os
import threading
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import offload
from offload.engines import Engine, open_engine
from offload.engines.aio import AioEngine
from offload.errors import OffloadWarning, StorageError
from tests.conftest import wait_until
from tests.doubles import (
    EngineWithoutRoom,
    FaultyEngine,
    InterruptedOnce,
    LateEngine,
    LazyEngine,
)
from tests.support import chain, drain, in_threads, rand

NBYTES = 64 * 64 * 4


def run(
    session: offload.Session | None = None, length: int = 8, wait: bool = False
) -> torch.Tensor:
    """A step whose backward asks for ``length`` tensors that are held by nobody else."""
    x = rand(64, 64).requires_grad_()
    with session.step() if session is not None else nullcontext():
        loss = chain(x * 1, length)
        if wait and session is not None:
            drain(session)
        loss.backward()
    assert x.grad is not None
    return x.grad


EXPECTED = run()


@pytest.fixture
def faulty(real_engine: Engine) -> FaultyEngine:
    return FaultyEngine(real_engine)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("good_writes", [0, 1, 5])
def test_writes_fail(open_session, faulty: FaultyEngine, good_writes: int, code: int) -> None:
    """The tensors stay in memory, one warning says why, the next step uses the disk again."""
    session = open_session(_engine=faulty)
    faulty.good_writes, faulty.code = good_writes, code
    with pytest.warns(OffloadWarning, match=errno.errorcode[code]) as warned:
        assert torch.equal(run(session, wait=True), EXPECTED)
    assert len(warned) == 1
    report = session.report()
    assert len(report.warnings) == 1
    assert report.written_bytes == good_writes * NBYTES
    assert torch.equal(run(session, wait=True), EXPECTED)  # warned of once only
    faulty.good_writes = None
    with session.step() as step:
        chain(rand(64, 64).requires_grad_(), 4).backward()
    assert step.report.offloaded_blocks == 4
    assert step.report.warnings == ()


def test_what_a_failed_write_leaves_in_memory_is_counted(
    open_session, faulty: FaultyEngine
) -> None:
    session = open_session(_engine=faulty)
    faulty.good_writes = 3
    with pytest.warns(OffloadWarning):
        run(session, wait=True)
    assert session.report().kept_bytes["error"] == 5 * NBYTES


def test_the_warning_points_at_the_users_line(open_session, faulty: FaultyEngine) -> None:
    session = open_session(_engine=faulty)
    faulty.good_writes = 0
    with pytest.warns(OffloadWarning) as warned:
        run(session)
    assert warned[0].filename == __file__


def test_writes_fail_and_the_user_wants_to_know(open_session, faulty: FaultyEngine) -> None:
    """``on_error="raise"``: at the end of the step, after its backward."""
    session = open_session(_engine=faulty, on_error="raise")
    faulty.good_writes = 0
    x = rand(64, 64).requires_grad_()
    with (
        pytest.warns(OffloadWarning),
        pytest.raises(StorageError, match="EIO") as caught,
        session.step(),
    ):
        loss = chain(x * 1, 8)
        loss.backward()
    assert caught.value.errno == errno.EIO
    assert torch.equal(x.grad, EXPECTED)
    faulty.good_writes = None
    assert torch.equal(run(session), EXPECTED)


def test_writes_fail_in_the_step_of_another_thread(open_session, faulty: FaultyEngine) -> None:
    """The step that ends first has not counted it, and warns all the same."""
    session = open_session(_engine=faulty)
    faulty.good_writes = 0
    entered, failed, left = (threading.Event() for _ in range(3))

    def leave() -> None:
        try:
            with session.step():
                entered.set()
                failed.wait()
        finally:
            left.set()

    def fail() -> None:
        entered.wait()
        x = rand(64, 64).requires_grad_()
        with session.step():
            loss = chain(x * 1, 8)
            drain(session)
            failed.set()
            left.wait()
            loss.backward()
        assert torch.equal(x.grad, EXPECTED)

    with pytest.warns(OffloadWarning, match="EIO") as warned:
        in_threads(leave, fail)
    assert len(warned) == 1


def test_a_warning_that_raises_leaves_the_step(open_session, faulty: FaultyEngine) -> None:
    session = open_session(_engine=faulty, verify_recompute=True)
    faulty.good_writes = 0
    with pytest.raises(OffloadWarning, match="EIO"):  # the tests make errors of them
        run(session, wait=True)
    x = rand(64, 64).requires_grad_()
    offload.checkpoint(torch.tanh, x).sum().backward()  # in no step: nobody looks at it
    assert session.recompute_report().regions == 0
    assert torch.equal(run(session), EXPECTED)


LATE = r"writing 16 KiB at offset \d+ of the scratch file in .* EIO .*when its step had ended"


@pytest.mark.parametrize("when", ["in the optimizer", "in a later backward", "at close"])
def test_writes_fail_when_the_step_is_over(open_session, real_engine: Engine, when: str) -> None:
    """Nothing is lost, the report of their step says so, and the next thing that runs warns."""
    late = LateEngine(real_engine)
    session = open_session(_engine=late)
    reports: list[offload.StepReport] = []
    session.log_every(1, reports.append)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 8)
    assert step.report.warnings == ()
    late.over = True
    if when == "in a later backward":
        loss.backward()
    late.good_writes = None if when == "in the optimizer" else 0
    if when == "at close":
        with pytest.warns(OffloadWarning, match=LATE) as warned:
            session.close()
    else:
        with pytest.warns(OffloadWarning, match=LATE) as warned, session.step() as other:
            pass
        assert other.report.warnings == (), "it was not this step's"
    assert len(warned) == 1
    assert warned[0].filename == __file__
    for report in (session.report(), reports[0]):
        assert len(report.warnings) == 1
        assert report.kept_bytes["error"] == 8 * NBYTES
        assert report.written_bytes == 0
    if when != "in a later backward":
        loss.backward()
    assert torch.equal(x.grad, EXPECTED)


def test_late_failures_are_warned_of_once(open_session, real_engine: Engine) -> None:
    late = LateEngine(real_engine)
    session = open_session(_engine=late)
    late.over = True
    with pytest.warns(OffloadWarning) as warned:
        for _ in range(3):
            with session.step():
                loss = chain(rand(64, 64).requires_grad_(), 3)
            loss.backward()
        session.drain()
        session.close()
    assert len(warned) == 1
    assert session.report().kept_bytes["error"] > 0


def test_an_exception_of_the_user_goes_first(open_session, faulty: FaultyEngine) -> None:
    session = open_session(_engine=faulty, on_error="raise")
    faulty.good_writes = 0
    with pytest.warns(OffloadWarning), pytest.raises(LookupError), session.step():
        chain(rand(64, 64).requires_grad_(), 3)
        raise LookupError


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EFBIG])
def test_no_space_can_be_reserved(open_session, faulty: FaultyEngine, code: int) -> None:
    session = open_session(_engine=faulty)
    faulty.reserve_code = code
    with pytest.warns(OffloadWarning, match="reserving space"):
        assert torch.equal(run(session), EXPECTED)
    assert session.report().offloaded_blocks == 0
    faulty.reserve_code = 0
    assert torch.equal(run(session), EXPECTED)
    assert session.report().offloaded_blocks > 0


def test_a_failure_keeps_no_tensor_alive(open_session, faulty: FaultyEngine) -> None:
    session = open_session(_engine=faulty)
    faulty.reserve_code = errno.ENOSPC
    gc.disable()
    try:
        with pytest.warns(OffloadWarning):
            run(session)
        assert session._hooks.live_blocks == 0
        assert session._tiers.disk.store.used_bytes == 0
    finally:
        gc.enable()


def test_a_failure_that_was_raised_keeps_no_tensor_alive(
    open_session, faulty: FaultyEngine
) -> None:
    """Nor the frames that it has passed, with all that is in them."""
    session = open_session(_engine=faulty, on_error="raise")
    faulty.good_writes = 0

    def train() -> None:
        with session.step():
            loss = chain(rand(64, 64).requires_grad_(), 3)
        loss.backward()

    gc.disable()
    try:
        with pytest.warns(OffloadWarning):
            try:
                train()
            except StorageError as e:
                assert e.errno == errno.EIO
            else:
                pytest.fail("it was not raised")
        assert session._hooks.live_blocks == 0
        assert session.held_bytes == 0
    finally:
        gc.enable()


@pytest.mark.parametrize("good_reads", [0, 3])
@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_reads_fail(
    open_session, faulty: FaultyEngine, good_reads: int, prefetch_bytes: int
) -> None:
    """Bytes that cannot be brought back are an error that says which; the next step works."""
    session = open_session(_engine=faulty, prefetch_bytes=prefetch_bytes)
    faulty.good_reads = good_reads
    x = rand(64, 64).requires_grad_()
    with session.step():
        loss = chain(x * 1, 8)
        drain(session)
        words = r"reading 16 KiB \(saved tensor float32\[64, 64\]\) at offset \d+ .*EIO"
        with pytest.raises(StorageError, match=words) as caught:
            loss.backward()
    assert caught.value.errno == errno.EIO
    del loss, caught
    faulty.good_reads = None
    assert torch.equal(run(session), EXPECTED)


def test_a_read_that_failed_can_be_tried_again(open_session, faulty: FaultyEngine) -> None:
    session = open_session(_engine=faulty)
    x = rand(64, 64).requires_grad_()
    with session.step():
        loss = chain(x * 1, 8)
        drain(session)
        faulty.good_reads = 0
        for _ in range(2):
            with pytest.raises(StorageError):
                loss.backward(retain_graph=True)
        faulty.good_reads = None
        x.grad = None
        loss.backward()
    assert torch.equal(x.grad, EXPECTED)


def test_backward_while_the_writes_have_not_begun(open_session, real_engine: Engine) -> None:
    """Bytes still in their slot are served from there, and writes nobody needs are given up."""
    session = open_session(_engine=LazyEngine(real_engine, reads=False))
    assert torch.equal(run(session), EXPECTED)
    drain(session)
    report = session.report()
    assert report.read_bytes == 0
    assert report.forwarded_bytes == 8 * NBYTES
    assert report.cancelled_bytes == 8 * NBYTES


def test_forward_waits_for_room(open_session, real_engine: Engine) -> None:
    """A disk slower than the forward: it waits, and memory stays within the window."""
    lazy = LazyEngine(real_engine, reads=False)
    session = open_session(_engine=lazy, window_bytes=3 * NBYTES, prefetch_bytes=2 * NBYTES)
    assert torch.equal(run(session, 20), run(length=20))
    assert max(total for total, _ in lazy.sizes_in_flight) == 3 * NBYTES
    assert session.report().peak_arena_bytes <= 5 * NBYTES
    assert session.report().backpressure_seconds > 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(
    window_pages=st.integers(1, 8),
    prefetch_pages=st.integers(0, 8),
    pages=st.lists(st.integers(1, 12), min_size=1, max_size=12),
)
def test_bytes_in_flight_never_exceed_the_window(
    tmp_path_factory: Any, window_pages: int, prefetch_pages: int, pages: list[int]
) -> None:
    """Whatever the sizes; but for the newest and one more, up to its size."""
    config = offload.Config(
        disk_dir=tmp_path_factory.getbasetemp(), min_offload_bytes=0, keep_last_bytes=0,
        window_bytes=4096 * window_pages, prefetch_bytes=4096 * prefetch_pages,
    )  # fmt: skip
    lazy = LazyEngine(open_engine(config), reads=False)
    with offload.Session(config, _engine=lazy) as session:
        xs = [torch.full((1024 * n,), 0.5).requires_grad_() for n in pages]
        with session.step():
            losses = [chain(x * 1, 2) for x in xs]
        for loss in losses:
            loss.backward()
        expected = [torch.autograd.grad(chain(x * 1, 2), x)[0] for x in xs]
        assert all(torch.equal(x.grad, e) for x, e in zip(xs, expected, strict=True))
        for total, newest in lazy.sizes_in_flight:
            assert total <= max(config.window_bytes, 2 * newest)
        del losses


def test_slow_reads_are_late_and_right(open_session, real_engine: Engine) -> None:
    """What was asked for in time but has not come is counted as late, and goes to the front."""
    lazy = LazyEngine(real_engine, writes=False)
    session = open_session(_engine=lazy)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 8)
        drain(session)
        loss.backward()
    assert torch.equal(x.grad, EXPECTED)
    assert (step.report.misses, step.report.lates, step.report.hits) == (1, 7, 0)
    assert [r.promoted for r in lazy.requests] == [False] + [True] * 7
    assert step.report.stall_seconds > 0


def test_a_request_that_two_workers_meet_is_let_go_of(tmp_path: Any) -> None:
    """One that was promoted stands in the queue twice, and may be under way at the second time."""
    engine = AioEngine(os.fspath(tmp_path), threads=2, block_bytes=4096)
    arena = engine.arena(1 << 20)
    slot = arena.allocate(1 << 20)
    assert slot is not None
    engine.write(slot, 0).wait()
    may_go_on = threading.Event()
    engine._inbox.loop.call_soon_threadsafe(may_go_on.wait)  # until both are in the queue
    request = engine.read(slot, 0, urgent=False, checksum=None)
    request.promote()
    may_go_on.set()
    request.wait()
    del slot, request
    wait_until(lambda: arena.used_bytes == 0)
    assert arena.used_bytes == 0
    engine.close()


def test_no_host_memory(open_session, real_engine: Engine) -> None:
    """Without a slot nothing leaves, and nothing breaks."""
    session = open_session(_engine=EngineWithoutRoom(real_engine))
    assert torch.equal(run(session), EXPECTED)
    report = session.report()
    assert report.offloaded_blocks == 0
    assert report.kept_bytes["budget"] == 8 * NBYTES
    assert report.warnings == ()


def spoil(directory: Any) -> None:
    """Change one byte in every page of the scratch file."""
    for fd in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{fd}"
        try:
            if not os.readlink(path).startswith(f"{directory}/"):
                continue
        except OSError:
            continue
        with open(path, "r+b") as file:
            for offset in range(0, 64 * NBYTES, 4096):
                file.seek(offset)
                old = file.read(1)
                file.seek(offset)
                file.write(bytes([old[0] ^ 0xFF]))
            file.flush()
            os.fsync(file.fileno())


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 20])
def test_spoilt_bytes_are_found_when_asked_to(
    open_session, engine: str, tmp_path: Any, prefetch_bytes: int
) -> None:
    session = open_session(engine=engine, verify=True, prefetch_bytes=prefetch_bytes)
    x = rand(64, 64).requires_grad_()
    with session.step():
        loss = chain(x * 1, 8)
        drain(session)
        spoil(tmp_path)
        with pytest.raises(StorageError, match=r"checksum .*not those that were written") as caught:
            loss.backward()
    assert caught.value.errno == errno.EBADMSG
    del loss, caught
    assert torch.equal(run(session), EXPECTED)


def test_good_bytes_pass_the_check(open_session, engine: str) -> None:
    session = open_session(engine=engine, verify=True)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 8)
        drain(session)
        loss.backward()
    assert torch.equal(x.grad, EXPECTED)
    assert step.report.read_bytes == 8 * NBYTES


def test_interrupted_while_waiting_for_room(open_session, real_engine: Engine) -> None:
    """A write that is still running keeps its memory, its extent and its share of the window."""
    session = open_session(_engine=InterruptedOnce(real_engine), window_bytes=NBYTES)
    with pytest.raises(KeyboardInterrupt), session.step():
        chain(rand(64, 64).requires_grad_(), 8)
    assert session._tiers.outbound.window.used_bytes == 2 * NBYTES, "forgotten while in flight"
    assert torch.equal(run(session), EXPECTED)
