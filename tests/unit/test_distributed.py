"""Figures over ranks, and who holds up the others."""

import dataclasses
import json

from offload.distributed import Figure, RankReports, gather
from offload.report import StepReport

EMPTY = StepReport.of([])


def ranks(*waits: float, seconds: float = 10.0) -> RankReports:
    reports = [
        dataclasses.replace(EMPTY, steps=1, seconds=seconds, stall_seconds=w, read_bytes=i)
        for i, w in enumerate(waits)
    ]
    return RankReports(tuple(reports), tuple(f"node{i // 2}" for i in range(len(waits))))


def test_figures() -> None:
    figures = ranks(0.1, 0.3, 0.2).figures
    assert figures["stall_seconds"] == Figure(0.1, 0.2, 0.3, 0, 1)
    assert figures["read_bytes"] == Figure(0, 1, 2, 0, 2)
    assert "overlap" not in figures, "no rank has transferred anything"
    assert "kept_bytes" not in figures


def test_the_straggler_waits_much_longer_than_the_others() -> None:
    slow = ranks(0.1, 0.2, 3.0, 0.1).straggler
    assert slow is not None
    assert (slow.rank, slow.host) == (2, "node1")
    assert ranks(0.1, 0.2, 0.5, 0.1).straggler is None, "less than a twentieth of a step"
    assert ranks(3.0, 3.0, 3.0, 3.0).straggler is None, "all wait as long"
    assert ranks(5.0).straggler is None


def test_what_people_and_machines_read() -> None:
    reports = ranks(0.1, 0.2, 3.0)
    assert "rank 2 on node1 waits longest for its transfers, 3.00 s (median 200.0 ms)" in (
        " ".join(str(reports).split())
    )
    found = json.loads(reports.to_json())
    assert found["format"] == 1
    assert found["straggler"]["rank"] == 2
    assert [r["host"] for r in found["ranks"]] == ["node0", "node0", "node1"]
    assert found["figures"]["stall_seconds"]["high"] == 3.0


def test_one_process_is_one_rank() -> None:
    assert gather(EMPTY).reports == (EMPTY,)
