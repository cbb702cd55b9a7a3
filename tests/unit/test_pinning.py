"""Where pinned memory comes from: the processors next to the device."""

import os

import pytest

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
