"""Where pinned memory comes from: the processors next to the device."""

import os
from pathlib import Path

import pytest

import offload
from offload.engines import open_engine
from offload.lanes.pinning import on_cpus, pinner_for


def test_a_thread_is_moved_and_comes_back() -> None:
    mine = os.sched_getaffinity(0)
    one = {min(mine)}
    with on_cpus(one | {10_000}):
        assert os.sched_getaffinity(0) == one
    assert os.sched_getaffinity(0) == mine


def test_it_comes_back_from_a_failure() -> None:
    mine = os.sched_getaffinity(0)
    with pytest.raises(RuntimeError, match="refused"), on_cpus({min(mine)}):
        raise RuntimeError("refused")
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize("cpus", [set(), {10_000}])
def test_processors_that_are_not_ours_change_nothing(cpus: set[int]) -> None:
    mine = os.sched_getaffinity(0)
    with on_cpus(cpus):
        assert os.sched_getaffinity(0) == mine


def test_kinds_without_an_adapter() -> None:
    assert pinner_for("cpu") is None
    assert pinner_for("xpu") is None
    assert pinner_for("cuda") is not None


def test_the_threads_of_an_engine_stay_where_they_were_started(tmp_path: Path, engine: str) -> None:
    before = set(os.listdir("/proc/self/task"))
    one = {min(os.sched_getaffinity(0))}
    with on_cpus(one):
        opened = open_engine(offload.Config(disk_dir=tmp_path, engine=engine))
    workers = {int(t) for t in os.listdir("/proc/self/task")} - {int(t) for t in before}
    assert workers
    assert all(os.sched_getaffinity(thread) == one for thread in workers)
    opened.close()
