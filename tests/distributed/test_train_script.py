"""The example that trains on several ranks: what it compares, and that it sees a difference."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner

import offload
from tests.distributed.ranks import Ranks

SCRIPTS = Path(__file__).parents[2] / "scripts"


def script() -> Any:
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    import train_fsdp

    return train_fsdp


MOVES = {"min_offload_bytes": 4096, "bundle_bytes": 128 << 10, "keep_last_bytes": 0}


def both_runs(directory: str, kind: str, recompute: bool) -> tuple[bool, bool, int]:
    train = script()
    workload, device = train.preset("gpt-tiny"), torch.device("cpu")
    plain = train.train(workload, kind, 2, device, None)
    with offload.Session(disk_dir=directory, **MOVES) as session:
        rules = train.RECOMPUTE if recompute else None
        ours = train.train(workload, kind, 2, device, session, rules)
        moved_bytes = session.report().offloaded_bytes
    other = replace(ours, gradients=[*ours.gradients[:-1], "0"])
    same = train._same({"plain": [plain], "offloaded": [ours]})
    return same, train._same({"plain": [plain], "offloaded": [other]}), moved_bytes


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_both_runs_have_the_same_bits(
    two: Ranks, tmp_path: Path, kind: str, recompute: bool
) -> None:
    for same, changed, moved_bytes in two.run(both_runs, str(tmp_path), kind, recompute):
        assert same
        assert not changed
        assert moved_bytes > 0


def planned(directory: str) -> tuple[bool, bool, dict[str, str], int, int]:
    train = script()
    workload, device = train.preset("gpt-tiny"), torch.device("cpu")
    plain = train.train(workload, "fsdp2", train.PLANNED_STEPS, device, None)
    options = {"disk_dir": directory, "min_offload_bytes": 4096, "device_budget": "3MiB"}
    with offload.Session(**options) as session:
        ours = train.train(workload, "fsdp2", train.PLANNED_STEPS, device, session, "auto")
    mine = dist.get_rank() == 1
    other = replace(ours, plan={**ours.plan, "blocks.0": "another"}) if mine else ours
    both = [train.of_all_ranks(run) for run in (plain, ours, other)]
    same = train._same({"plain": both[0], "offloaded": both[1]})
    changed = train._same({"plain": both[0], "offloaded": both[2]})
    return same, changed, ours.plan, ours.peak_live_bytes, ours.budget_bytes


def test_a_plan_for_a_budget(two: Ranks, tmp_path: Path) -> None:
    for same, changed, plan, peak_bytes, budget_bytes in two.run(planned, str(tmp_path)):
        assert same
        assert not changed, "one of them has another plan"
        assert len(plan) == 3
        assert peak_bytes <= budget_bytes == 3 << 20


def profiles(directory: str) -> str:
    train = script()
    options = {"disk_dir": directory, **MOVES}
    workload, device = train.preset("gpt-tiny"), torch.device("cpu")
    return str(train.profiled(workload, "ddp", device, Path(directory, "profile"), options))


def test_timelines_of_all_ranks_in_one_file(two: Ranks, tmp_path: Path) -> None:
    path = two.run(profiles, str(tmp_path))[0]
    trace = json.loads(Path(path).read_text())
    assert trace["otherData"]["ranks"] == [0, 1]
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["pid"] for e in slices} == {0, 1}
    latest_us = max(e["ts"] for e in slices)
    assert 0 <= min(e["ts"] for e in slices) < latest_us < 60e6, "one clock"


def test_it_says_how_to_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    result = CliRunner().invoke(script().main, [])
    assert result.exit_code == 2
    assert "torchrun" in result.output
