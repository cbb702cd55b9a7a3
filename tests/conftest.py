"""Fixtures of all tests: sessions on both engines, and a look at what they leave behind."""

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

sys.path.insert(
    0, str(Path(__file__).parent.parent)
)  # so that "tests.support" is found from everywhere

import offload
from offload.engines import Engine, native_is_built, open_engine

# The same examples every time, of no particular speed.
hypothesis.settings.register_profile(
    "same", derandomize=True, deadline=None, database=None, max_examples=50
)
hypothesis.settings.load_profile("same")
os.environ.pop("COLUMNS", None)  # of the terminal that the tests are run from

ENGINES = ["native", "aio"]
Opener = Callable[..., offload.Session]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Let fixtures know whether their test passed."""
    report = yield
    if report.when == "call":
        item.stash[_passed] = report.passed
    return report


_passed = pytest.StashKey[bool]()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)  # gradients are bit-identical for one number of threads only
    if native_is_built():
        from offload import _native

        source, target = torch.zeros(1 << 23, dtype=torch.uint8), torch.zeros(1 << 23)
        _native.copy(target.data_ptr(), source.data_ptr(), 1 << 23)  # its helpers stay for good
    with contextlib.suppress(ImportError):
        import tqdm

        tqdm.tqdm.monitor_interval = 0  # where it is there torch shows bars, and a thread of theirs
    gc.collect()
    gc.freeze()  # all that was imported: the collections below then take no time


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The name of each disk engine in turn."""
    if request.param == "native" and not native_is_built():
        pytest.skip("the C++ extension was not built")
    return str(request.param)


@pytest.fixture
def any_engine() -> str:
    """The name of one engine, for what does not depend on it."""
    return "native" if native_is_built() else "aio"


@pytest.fixture
def open_session(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens sessions that offload everything at once; in the end nothing may be left."""
    before = held()
    opened: list[offload.Session] = []

    def opener(**options: Any) -> offload.Session:
        options = {"disk_dir": tmp_path, "min_offload_bytes": 0, "keep_last_bytes": 0, **options}
        if "engine" not in options and "_engine" not in options:
            options["engine"] = "native" if native_is_built() else "aio"
        opened.append(offload.Session(**options))
        return opened[-1]

    yield opener
    gc.collect()
    passed = request.node.stash.get(_passed, False)
    while opened:
        close_and_check(opened.pop(), passed)
    gc.collect()
    gc.collect()  # what the finalisers of the first still held
    if passed:
        assert os.listdir(tmp_path) == [], "a file was left in the directory"
        wait_until(lambda: held() <= before)  # a joined thread is a moment longer in /proc
        assert held() <= before, "descriptors or threads were left"


@pytest.fixture
def session(open_session: Opener, engine: str) -> offload.Session:
    """A session with the defaults of ``open_session``, on each engine."""
    return open_session(engine=engine)


def close_and_check(session: offload.Session, passed: bool) -> None:
    """Close; after a test that passed, nothing may be left."""
    # A thread of autograd's lets go of a graph, or of an error, a moment after it is done.
    wait_until(lambda: session._hooks.live_blocks == 0)
    live_blocks = session._hooks.live_blocks
    session.close()
    if passed:
        assert live_blocks == 0, "a graph is still alive"
        assert_empty(session)


def assert_empty(session: offload.Session) -> None:
    """Every slot, extent and reservation of ``session`` is back."""
    tiers = session._tiers
    wait_until(lambda: tiers.host.used_bytes == 0)  # a worker lets go a moment after it is done
    assert tiers.host.used_bytes == 0
    assert tiers.host.outside_bytes == 0
    assert tiers.disk.store.used_bytes == 0
    assert tiers.outbound.window.used_bytes == 0
    assert tiers.inbound.ahead.used_bytes == 0


def held() -> tuple[int, int]:
    """Open descriptors of this process, and its running threads that Python or an engine started.

    Torch starts more of its own whenever it first has work for them.
    """
    native = 0
    for comm in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread ended meanwhile
            native += comm.read_text().startswith(("offload-io", "offload-fault"))
    return len(os.listdir("/proc/self/fd")), threading.active_count() + native


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for at most a fifth of a second."""
    for _ in range(20):
        if condition():
            return
        time.sleep(0.01)


@pytest.fixture
def real_engine(tmp_path: Path, engine: str) -> Engine:
    """An engine of each kind, with its file in the test's directory, for a double to wrap."""
    return open_engine(offload.Config(disk_dir=tmp_path, engine=engine))
