"""Limits and accidents of the real machine: no doubles here."""

import ctypes
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.errors import OffloadWarning
from tests.conftest import wait_until
from tests.support import assert_identical, chain, drain, in_child, net, rand, scratch_files

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
BASE = {"min_offload_bytes": 0, "keep_last_bytes": 0}


def run(session: offload.Session | None = None, nbytes: int = 1 << 14, length: int = 6) -> Any:
    x = rand(nbytes // 4).requires_grad_()
    with session.step() if session is not None else nullcontext():
        h = x * 1
        loss = chain(h, length)
        del h
        if session is not None:
            drain(session)
        loss.backward()
    return x.grad


def _target(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # of the directory that was listed
        return ""


def test_write_that_failed_holds_no_memory(open_session, tmp_path: Path, engine: str) -> None:
    """Its slot is free at once, without the garbage collector."""
    session = open_session(engine=engine)
    run(session)
    (file,) = (fd for fd in os.listdir("/proc/self/fd") if _target(fd).startswith(str(tmp_path)))
    gc.disable()
    try:
        with open("/dev/null", "rb") as unwritable:
            os.dup2(unwritable.fileno(), int(file), inheritable=False)
        with pytest.warns(OffloadWarning, match="EBADF"):
            run(session)
        wait_until(lambda: session.held_bytes == 0)
        assert session.held_bytes == 0
    finally:
        gc.enable()


OUTLIVES = """
import sys, threading, torch, offload

def train():
    threading.main_thread().join()
    x = torch.rand(1 << 14, requires_grad=True)
    with offload.Session(engine=sys.argv[1], disk_dir=sys.argv[2], min_offload_bytes=0) as session:
        for _ in range(3):
            with session.step():
                (x.sin().cos().exp()).sum().backward()
    print("trained", flush=True)

threading.Thread(target=train).start()
"""


def test_training_that_outlives_the_main_thread(tmp_path: Path, engine: str) -> None:
    """Then no pool of threads takes anything more; what cannot be written stays in memory."""
    done = subprocess.run(
        [sys.executable, "-c", OUTLIVES, engine, tmp_path], capture_output=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, b"trained\n"), done.stderr


def test_size_of_files_is_limited(tmp_path: Path, engine: str) -> None:
    """``ulimit -f`` is a full disk with another name, not the end of the process."""

    def child() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, resource.RLIM_INFINITY))
        with offload.Session(disk_dir=tmp_path, engine=engine, **BASE) as session:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert torch.equal(run(session), run())
            assert [w.category for w in caught] == [OffloadWarning]
            assert "EFBIG" in str(caught[0].message)
            assert "ulimit -f" in str(caught[0].message)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            before = session.report().offloaded_blocks
            assert torch.equal(run(session), run())
            assert session.report().offloaded_blocks == before + 6

    with in_child() as in_fork:
        in_fork(child)


@pytest.fixture
def tiny_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A file system of 256 KiB."""
    path = tmp_path_factory.mktemp("tiny")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(path), b"tmpfs", 0, b"size=256k") != 0:
        pytest.skip("mounting is not permitted")
    yield path
    libc.umount2(os.fsencode(path), 2)  # MNT_DETACH


def test_disk_is_full(tiny_disk: Path, open_session, engine: str) -> None:
    """What fits goes to the disk, the rest stays; one warning says how much is free."""
    with pytest.warns(OffloadWarning, match="is on tmpfs"):
        session = open_session(engine=engine, disk_dir=tiny_disk)
    with pytest.warns(OffloadWarning, match=r"ENOSPC .* are free there") as warned:
        assert torch.equal(run(session, 1 << 16, 8), run(None, 1 << 16, 8))
    assert len(warned) == 1
    report = session.report()
    assert 0 < report.offloaded_blocks <= 4
    assert report.kept_bytes["error"] > 0
    with session.step() as step:  # a new step tries again
        chain(rand(64).requires_grad_(), 2).backward()
    assert step.report.offloaded_blocks == 2
    session.close()


def test_directory_in_memory_works_with_a_warning(
    tmp_path_factory: pytest.TempPathFactory, engine: str
) -> None:
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs here")
    with (
        pytest.warns(OffloadWarning, match="keeps files in memory") as warned,
        offload.Session(disk_dir="/dev/shm", engine=engine, **BASE) as session,
    ):
        assert torch.equal(run(session), run())
        assert session.report().read_bytes > 0
    assert warned[0].filename == __file__


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_directory_of_somebody_else(tmp_path: Path) -> None:
    def child() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        with pytest.raises(ValueError, match=r"not writable by this user|does not exist"):
            offload.Config(disk_dir=tmp_path)

    tmp_path.chmod(0o555)
    with in_child() as in_fork:
        in_fork(child)


def test_long_path(open_session, tmp_path: Path, engine: str) -> None:
    deep = tmp_path.joinpath(*["d" * 60] * 5)
    deep.mkdir(parents=True)
    session = open_session(engine=engine, disk_dir=deep)
    assert torch.equal(run(session), run())
    assert os.listdir(deep) == []
    session.close()
    os.removedirs(deep)
    tmp_path.mkdir(exist_ok=True)


def test_directory_removed_meanwhile(open_session, tmp_path: Path, engine: str) -> None:
    """The file is open and has no name; its directory is not needed any more."""
    below = tmp_path / "below"
    below.mkdir()
    session = open_session(engine=engine, disk_dir=below)
    below.rmdir()
    assert torch.equal(run(session), run())
    assert session.report().warnings == ()


@pytest.mark.parametrize("nbytes", [1, 511, 513, 4095, 4096, 4097, 100_003])
@pytest.mark.parametrize("verify", [False, True])
def test_odd_sizes(open_session, engine: str, nbytes: int, verify: bool) -> None:
    session = open_session(engine=engine, verify=verify)
    x = torch.arange(nbytes).remainder(251).to(torch.uint8)

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, h: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(t)
            return h * 1

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
            back.append(ctx.saved_tensors[0].clone())
            return g, None

    back: list[torch.Tensor] = []
    with session.step() as step:
        loss = Saves.apply(torch.ones(1, requires_grad=True), x.clone()).sum()
        drain(session)
        loss.backward()
    assert_identical([x], back)
    assert step.report.read_bytes == -(-nbytes // 4096) * 4096


@pytest.mark.parametrize(
    "options",
    [
        {"window_bytes": 4096, "prefetch_bytes": 1 << 20},
        {"window_bytes": 4096, "prefetch_bytes": 4096},
        {"window_bytes": 4096, "prefetch_bytes": 0},
        {"window_bytes": 4096, "host_budget": 4096},
        {"window_bytes": 1 << 20, "prefetch_bytes": 4096, "keep_last_bytes": 1},
    ],
)
def test_storages_larger_than_window_and_arena(
    open_session, engine: str, options: dict[str, int]
) -> None:
    """They pass one by one, in memory of their own if need be; 3 MB is more than any of these."""
    session = open_session(engine=engine, **options)
    nbytes = 3 << 20
    assert torch.equal(run(session, nbytes, 4), run(None, nbytes, 4))
    assert session.report().offloaded_bytes >= 3 * nbytes
    assert session._tiers.host.outside_bytes == 0


def test_killed_in_the_middle_of_a_step(tmp_path: Path, engine: str) -> None:
    """Nothing is left in the directory, whatever was in flight."""
    pid = os.fork()
    if pid == 0:
        session = offload.Session(disk_dir=tmp_path, engine=engine, **BASE)
        with session.step():
            chain(rand(1 << 16).requires_grad_(), 20)
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_two_processes_in_one_directory(tmp_path: Path, engine: str) -> None:
    """Each has a file of its own."""

    def train(seed: int) -> None:
        with offload.Session(disk_dir=tmp_path, engine=engine, **BASE) as session:
            for _ in range(5):
                model, x = net(seed), rand(64, 16, seed=seed)
                model(x).square().sum().backward()
                expected = [p.grad.clone() for p in model.parameters()]
                model.zero_grad()
                with session.step():
                    model(x).square().sum().backward()
                assert_identical(expected, [p.grad for p in model.parameters()])

    pids = []
    for seed in (1, 2):
        pid = os.fork()
        if pid == 0:
            try:
                train(seed)
            except BaseException:
                os._exit(1)
            os._exit(0)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0]
    assert os.listdir(tmp_path) == []


def test_two_sessions_at_once(open_session, engine: str) -> None:
    """One inside the other, each with its own graph, differentiated crosswise."""
    one, two = open_session(engine=engine), open_session(engine=engine)
    x = rand(64).requires_grad_()
    with one.step():
        first = chain(x * 1, 3)
        with two.step():
            second = chain(x * 2, 3)
        third = chain(x * 3, 3)
    second.backward()
    third.backward()
    first.backward()
    got, x.grad = x.grad, None
    for k in (2, 3, 1):
        chain(x * k, 3).backward()
    assert torch.equal(got, x.grad)
    assert one.report().offloaded_blocks == 6
    assert two.report().offloaded_blocks == 3


@pytest.mark.slow
def test_without_the_extension(tmp_path: Path) -> None:
    """The Python engine with one warning, silent if asked for; native by name is an error."""
    program = textwrap.dedent(f"""
        import sys, warnings
        sys.modules["offload._native"] = None  # as if it had never been built
        import torch, offload
        options = dict(disk_dir={str(tmp_path)!r}, min_offload_bytes=0, keep_last_bytes=0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with offload.Session(**options) as session, session.step() as step:
                (torch.ones(64, requires_grad=True) * 2).sin().sum().backward()
            assert step.report.offloaded_blocks == 1, step.report
            assert [w.category for w in caught] == [offload.errors.OffloadWarning], caught
            assert "engine='aio' to silence" in str(caught[0].message), caught[0]
            offload.Session(engine="aio", **options).close()
            assert len(caught) == 1
        try:
            offload.Session(engine="native", **options)
        except ImportError as e:
            print("ImportError")
    """)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=False, cwd=Path(offload.__file__).parent.parent,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, "ImportError"), done.stderr


def test_disk_space_is_used_again(open_session, tmp_path: Path, engine: str) -> None:
    """From the second step on the file does not grow."""
    session = open_session(engine=engine)
    sizes = []
    for _ in range(5):
        run(session, 1 << 20, 80)  # more than one segment of the file
        (file,) = scratch_files(tmp_path)
        sizes.append(file.st_size)
    assert len(set(sizes[1:])) == 1


def test_bytes_reported_are_bytes_moved(open_session, tmp_path: Path, engine: str) -> None:
    """The kernel's own count of this process agrees, where I/O goes past the page cache."""

    def counted() -> dict[str, int]:
        with open("/proc/self/io") as f:
            return {k: int(v) for k, v in (line.split(": ") for line in f)}

    session = open_session(engine=engine)
    run(session)  # the file has its space now
    before, start = session.report(), counted()
    run(session, (1 << 18) - 4, 16)
    end, after = counted(), session.report()
    written = after.written_bytes - before.written_bytes
    read = after.read_bytes - before.read_bytes
    assert written == read == 16 << 18
    if end["read_bytes"] == start["read_bytes"]:
        pytest.skip("the file system of the test goes through the page cache")
    assert end["write_bytes"] - start["write_bytes"] == pytest.approx(written, abs=1 << 16)
    assert end["read_bytes"] - start["read_bytes"] == pytest.approx(read, abs=1 << 16)
