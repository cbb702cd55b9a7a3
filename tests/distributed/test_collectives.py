"""Collectives are launched in the same order, and nothing of ours blocks while one is in flight."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.engines import open_engine
from tests.distributed import recording
from tests.distributed.programs import Run, opened, trained, transformer
from tests.distributed.ranks import Ranks
from tests.doubles import LazyEngine
from tests.support import assert_identical


def data_parallel(group: Any) -> torch.nn.Module:
    return DistributedDataParallel(transformer(), process_group=group, bucket_cap_mb=0.02)


def sharded(group: Any) -> torch.nn.Module:
    mesh = DeviceMesh.from_group(group, "cpu")
    model = transformer()
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS = {"ddp": data_parallel, "fsdp2": sharded}


def logs(directory: str, kind: str, prompt: bool) -> tuple[recording.Log, recording.Log]:
    """What happens in two steps without a session, and with one."""
    group = recording.recording_group()
    expected = trained(KINDS[kind](group), Run())
    plain = recording.log.copy()
    group = recording.recording_group()
    inner = open_engine(offload.Config(disk_dir=directory))
    slow = LazyEngine(inner, writes=False)
    engine = recording.WatchedEngine(inner if prompt else slow, at_once=prompt)
    with opened(directory, _engine=engine) as session:
        got = trained(KINDS[kind](group), Run(session))
        ours = recording.log.copy()
        assert session.report().offloaded_blocks > 0
        assert_identical(expected, got)
        slow.requests.clear()
    dist.barrier()
    return plain, ours


def of_the_group(log: recording.Log) -> recording.Log:
    return [event for event in log if event[0] != "blocked"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_blocks_where_the_disk_keeps_up(two: Ranks, tmp_path: Path, kind: str) -> None:
    for plain, ours in two.run(logs, str(tmp_path), kind, True):
        assert len([e for e in plain if e[0] == "launch"]) >= 4
        assert of_the_group(ours) == plain
        assert [e for e in ours if e[0] == "blocked"] == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_the_same_where_it_does_not(two: Ranks, tmp_path: Path, kind: str) -> None:
    """A disk on which nothing moves until somebody waits: late, but in the same order."""
    for plain, ours in two.run(logs, str(tmp_path), kind, False):
        assert of_the_group(ours) == plain
        assert len(ours) > len(plain), "it blocks, which the other test would have noticed"
