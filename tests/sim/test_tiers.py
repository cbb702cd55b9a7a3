"""The three tiers of an accelerator: what goes where, and what happens when one is full."""

import errno
from pathlib import Path

import pytest
import simdev
import torch
from offloading import open_engine, session_on_sim

import offload
from offload.errors import OffloadWarning
from tests.doubles import FaultyEngine
from tests.support import chain, drain

NBYTES = 16 << 10
LENGTH = 12
ON_DISK = {"policy": lambda tensor: offload.Placement.DISK}


@pytest.fixture(autouse=True)
def _lagging_link() -> None:
    """A link on which a tensor takes longer than the operation that makes it."""
    simdev.configure(timed_queries=True, d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)


def leaf() -> torch.Tensor:
    x = torch.linspace(0, 1, NBYTES // 4).to("sim")
    return x.requires_grad_()


def expected() -> torch.Tensor:
    x = leaf()
    chain(x, LENGTH).backward()
    return x.grad.cpu()


def run(session: offload.Session) -> tuple[torch.Tensor, offload.StepReport]:
    """The gradient of a chain whose graph saves ``LENGTH`` storages, and the report."""
    x = leaf()
    with session.step() as step:
        chain(x, LENGTH).backward()
    torch.accelerator.synchronize()
    return x.grad.cpu(), step.report


def test_host_memory_first(tmp_path: Path) -> None:
    with session_on_sim(str(tmp_path)) as session:
        grad, report = run(session)
    assert torch.equal(grad, expected())
    assert report.offloaded_blocks == LENGTH
    assert report.written_bytes == 0
    assert report.peak_arena_bytes == LENGTH * NBYTES


def test_the_oldest_go_on_to_the_disk(tmp_path: Path) -> None:
    """Backward wants those last: what it wants first is still in host memory."""
    budget = 4 * NBYTES
    with session_on_sim(str(tmp_path), host_budget=budget, prefetch_bytes=0) as session:
        grad, report = run(session)
    assert torch.equal(grad, expected())
    assert report.peak_arena_bytes <= budget
    assert report.written_bytes >= (LENGTH - 4) * NBYTES
    assert report.read_bytes < report.reloaded_bytes, "some were not written or not read back"
    assert report.kept_bytes.get("budget", 0) == 0


def test_neither_host_nor_disk_has_room(tmp_path: Path) -> None:
    """What nobody has room for stays on the device; nothing fails, and nothing waits for ever."""
    budget = 4 * NBYTES
    with session_on_sim(str(tmp_path), host_budget=budget, disk_budget=0) as session:
        grad, report = run(session)
    assert torch.equal(grad, expected())
    assert report.written_bytes == 0
    assert report.offloaded_bytes == budget
    assert report.kept_bytes["budget"] == (LENGTH - 4) * NBYTES


def test_a_failing_disk_leaves_blocks_in_host_memory(tmp_path: Path) -> None:
    faulty = FaultyEngine(open_engine(str(tmp_path)))
    faulty.good_writes, faulty.code = 2, errno.ENOSPC
    options = {"host_budget": 4 * NBYTES, "_engine": faulty}
    with session_on_sim(str(tmp_path), **options) as session:
        with pytest.warns(OffloadWarning, match="No space left"):
            grad, report = run(session)
        assert torch.equal(grad, expected())
        assert report.warnings
        faulty.good_writes = None
        grad, report = run(session)
        assert torch.equal(grad, expected())
        assert report.warnings == ()


def test_what_is_still_on_the_device_is_handed_back(tmp_path: Path) -> None:
    """The tail never left, and a copy that backward overtook is not undone by another copy."""
    with session_on_sim(
        str(tmp_path), keep_last_bytes=2 * NBYTES, window_bytes=4 * NBYTES
    ) as session:
        before = simdev.stats()
        grad, report = run(session)
        after = simdev.stats()
    assert torch.equal(grad, expected())
    assert after.d2h.nbytes - before.d2h.nbytes == (LENGTH - 2) * NBYTES + NBYTES  # and the grad
    # Two of the tail, and at least the last of the window.
    assert report.forwarded_bytes >= 3 * NBYTES
    there = NBYTES  # the leaf
    assert report.reloaded_bytes <= LENGTH * NBYTES - report.forwarded_bytes
    assert report.reloaded_bytes + report.forwarded_bytes >= LENGTH * NBYTES - there


def test_reloads_ahead_stay_within_the_prefetch_window(tmp_path: Path) -> None:
    with session_on_sim(str(tmp_path), prefetch_bytes=4 * NBYTES) as session:
        run(session)
        ahead = session._tiers.inbound.ahead
        assert ahead.peak_bytes == 3 * NBYTES  # beside the one in use
        assert ahead.used_bytes == 0


def test_a_guess_nobody_asked_for_ends_with_its_step(tmp_path: Path) -> None:
    """A forward whose graph is dropped half way through its backward leaves nothing behind."""

    class StopError(Exception):
        pass

    def stop(grad: torch.Tensor) -> None:
        raise StopError

    with session_on_sim(str(tmp_path), prefetch_bytes=4 * NBYTES) as session:
        x = leaf()
        with session.step():
            half = chain(x, LENGTH // 2)
            middle = (x * half.detach()).sin()
            middle.register_hook(stop)
            loss = chain(middle, LENGTH)
            with pytest.raises(StopError):
                loss.backward()
        del half, middle, loss
        grad, _ = run(session)
        assert torch.equal(grad, expected())
        assert session._tiers.inbound.ahead.used_bytes == 0


@pytest.mark.parametrize("options", [ON_DISK, {"host_budget": 4 * NBYTES}])
def test_verified_bytes(options: dict[str, object], tmp_path: Path) -> None:
    """The checksum is taken of what the device copied, and checked when it is read back."""
    x = leaf()
    with session_on_sim(str(tmp_path), verify=True, **options) as session:
        with session.step() as step:
            loss = chain(x, LENGTH)
            torch.accelerator.synchronize()
            drain(session)  # or backward would find the bytes in their slots
            loss.backward()
        assert torch.equal(x.grad.cpu(), expected())
        assert step.report.read_bytes > 0


def test_only_the_managed_device(tmp_path: Path) -> None:
    """A session for the accelerator leaves the CPU's tensors alone, and the reverse."""
    x = torch.linspace(0, 1, NBYTES // 4).requires_grad_()
    with session_on_sim(str(tmp_path)) as session:
        with session.step() as step:
            chain(x, LENGTH).backward()
        assert step.report.offloaded_bytes == 0
    with offload.Session(device="cpu", disk_dir=tmp_path, min_offload_bytes=0) as session:
        _, report = run(session)
        assert report.offloaded_bytes == 0


def test_the_accelerator_is_the_default(tmp_path: Path) -> None:
    assert offload.Config(disk_dir=tmp_path).device == torch.device("sim")
    assert offload.Config(disk_dir=tmp_path, device="sim:0").device == torch.device("sim", 0)
    with pytest.raises(ValueError, match="this machine and its torch have 'sim' and 'cpu'"):
        offload.Config(device="cuda")


def test_pinned_memory_is_given_back_with_the_last_graph(tmp_path: Path) -> None:
    """A graph may outlive its session: what it needs stays until it is done."""
    x = leaf()
    with (
        offload.Session(
            device="sim", disk_dir=tmp_path, min_offload_bytes=0, keep_last_bytes=0
        ) as session,
        session.step(),
    ):
        loss = chain(x, LENGTH)
    del session
    assert simdev.stats().pinned.current_bytes > 0
    loss.backward()
    assert torch.equal(x.grad.cpu(), expected())
    del loss
    assert simdev.stats().pinned.current_bytes == 0


def test_no_device_memory_for_a_guess(tmp_path: Path) -> None:
    """What cannot be brought back early is brought back when it is asked for."""
    x = leaf()
    with session_on_sim(str(tmp_path), prefetch_bytes=64 * NBYTES) as session:
        with session.step():
            loss = chain(x, LENGTH)
            torch.accelerator.synchronize()
            session._tiers.poll()
            torch.accelerator.empty_cache()
            allocated = torch.accelerator.memory_allocated()
            simdev.configure(capacity_bytes=allocated + NBYTES // 2)
            blocks = [known() for known in session._hooks._blocks._known.values()]
            gone = next(block for block in blocks if block.resident() is None)
            assert not session._tiers.prefetch(gone)
            assert session._tiers.inbound.ahead.used_bytes == 0
            simdev.configure(capacity_bytes=1 << 30)
            del blocks, gone
            loss.backward()
        assert torch.equal(x.grad.cpu(), expected())


def test_times_are_the_devices_own(tmp_path: Path) -> None:
    """Copies and what the computation waited for them, told by events: no synchronisation."""
    seconds = NBYTES / 1e9  # a copy over this link
    with session_on_sim(str(tmp_path), prefetch_bytes=NBYTES, window_bytes=2 * NBYTES) as session:
        before = simdev.stats().syncs
        with session.step():
            x = leaf()
            chain(x, LENGTH).backward()
        assert simdev.stats().syncs.event == before.event
        torch.accelerator.synchronize()
        report = session.report()
    copies = LENGTH + report.reloaded_bytes // NBYTES
    assert report.transfer_seconds <= copies * 1.6 * seconds  # with the latency of each
    assert report.transfer_seconds > LENGTH * seconds  # the directions overlap, each is serial
    assert 0 < report.stall_seconds < LENGTH * 1.6 * seconds
    assert 0 < report.backpressure_seconds < LENGTH * 1.6 * seconds
    assert 0 <= report.overlap < 1


def test_a_storage_resized_while_it_is_copied(tmp_path: Path) -> None:
    """What was copied is not what it had: it stays, and backward sees what plain training would."""
    simdev.configure(
        scheduler=simdev.Scheduler.THREADS, sleep_scale=1.0, copy_latency_ns=20_000_000
    )
    w = torch.full((NBYTES // 4,), 2.0, device="sim").requires_grad_()
    with session_on_sim(str(tmp_path)) as session:
        with session.step() as step:
            x = torch.full((NBYTES // 4,), 5.0, device="sim")
            loss = (x * w).sum()
            x.untyped_storage().resize_(0)
            usurper = torch.full((NBYTES // 4,), 7.0, device="sim")  # of its memory
            x.untyped_storage().resize_(NBYTES)
            with torch.autograd._unsafe_preserve_version_counter(x):
                x.fill_(3.0)
            del x
            torch.accelerator.synchronize()
            loss.backward()
        del usurper
        assert set(w.grad.tolist()) == {3.0}
        assert step.report.kept_bytes["kind"] > 0
    simdev.races()  # the fill was not ordered after the copy, whose bytes were not used


def test_storages_larger_than_all_of_host_memory(tmp_path: Path) -> None:
    """One of them at a time: the others stay on the device, or wait until it is on the disk."""
    budget = NBYTES // 2
    options = {"host_budget": budget, "window_bytes": budget, "prefetch_bytes": budget}
    with session_on_sim(str(tmp_path), **options, disk_budget=0) as session:
        grad, report = run(session)
        assert torch.equal(grad, expected())
        assert report.peak_arena_bytes == NBYTES
        assert report.kept_bytes["budget"] == (LENGTH - 1) * NBYTES
    with session_on_sim(str(tmp_path), **options) as session:
        grad, report = run(session)
        assert torch.equal(grad, expected())
        assert report.written_bytes >= (LENGTH - 2) * NBYTES


def test_processes_share_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = offload.Config(device="sim", disk_dir=tmp_path)
    alone = config.arena_bytes
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert config.arena_bytes == pytest.approx(alone / 4, rel=0.2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    with pytest.raises(ValueError, match=r"LOCAL_WORLD_SIZE is 'four'.*or set it to that number"):
        offload.Session(device="sim", disk_dir=tmp_path)


def test_a_device_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device is 'sim:7', but there are 1 devices"):
        offload.Config(device="sim:7")
