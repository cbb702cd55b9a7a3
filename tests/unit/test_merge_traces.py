"""Timelines of ranks become one: process numbers, clocks and identities."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from offload.__main__ import main
from offload.cli.merge_traces import merged_trace


def slice_of(name: str, ts: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 1, "tid": 3, "ts": ts, "dur": 2.0, **more}


def trace(*events: dict[str, Any], **about: Any) -> dict[str, Any]:
    return {"traceEvents": list(events), "otherData": about}


def named(merged: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [e for e in merged["traceEvents"] if e["name"] == name]


def test_process_numbers_are_ranks() -> None:
    merged = merged_trace([trace(slice_of("a", 1), rank=1), trace(slice_of("b", 2), rank=0)])
    assert [(e["pid"], e["ts"], e["tid"]) for e in named(merged, "a")] == [(1, 1, 3)]
    assert [(e["pid"], e["ts"]) for e in named(merged, "b")] == [(0, 2)]
    assert {e["pid"]: e["args"]["name"] for e in named(merged, "process_name")} == {
        0: "rank 0",
        1: "rank 1",
    }
    assert {e["args"]["sort_index"] for e in named(merged, "process_sort_index")} == {0, 1}


def test_clocks_are_put_in_agreement() -> None:
    merged = merged_trace(
        [
            trace(slice_of("late", 0.0), started_unix_ns=1_000_005_000),
            trace(slice_of("early", 7.0), started_unix_ns=1_000_000_000),
        ]
    )
    assert named(merged, "late")[0]["ts"] == 5.0
    assert named(merged, "early")[0]["ts"] == 7.0
    assert merged["otherData"] == {"ranks": [0, 1], "started_unix_ns": 1_000_000_000}


def test_clocks_stay_if_one_is_not_known() -> None:
    merged = merged_trace([trace(slice_of("a", 1.0), started_unix_ns=10**9), [slice_of("b", 1.0)]])
    assert [e["ts"] for e in merged["traceEvents"] if "ts" in e] == [1.0, 1.0]


def test_several_processes_and_flows_stay_apart() -> None:
    events = [
        {"ph": "M", "name": "process_name", "pid": 5, "tid": 0, "args": {"name": "host"}},
        {"ph": "s", "name": "flow", "pid": 5, "tid": 0, "ts": 0, "id": 9},
        {"ph": "f", "name": "flow", "pid": "gpu", "tid": 0, "ts": 1, "id": 9},
    ]
    merged = merged_trace([events, events])
    assert [e["pid"] for e in named(merged, "flow")] == [0, 2, 1, 3]
    assert [e["id"] for e in named(merged, "flow")] == ["0.9", "0.9", "1.9", "1.9"]
    names = {e["pid"]: e["args"]["name"] for e in named(merged, "process_name")}
    assert names == {0: "rank 0: host", 1: "rank 1: host", 2: "rank 0", 3: "rank 1"}


def test_what_cannot_be_merged() -> None:
    with pytest.raises(ValueError, match=r"ranks \[1, 1\]: give each rank's once"):
        merged_trace([trace(rank=1), trace(rank=1)])
    with pytest.raises(ValueError, match="trace 0 has no list of traceEvents"):
        merged_trace([{"events": []}])


def test_the_command(tmp_path: Path) -> None:
    first, second, out = tmp_path / "0.json", tmp_path / "1.json.gz", tmp_path / "all.json.gz"
    first.write_text(json.dumps(trace(slice_of("a", 1))))
    second.write_bytes(gzip.compress(json.dumps([slice_of("b", 1)]).encode()))
    result = CliRunner().invoke(main, ["merge-traces", str(out), str(first), str(second)])
    assert result.exit_code == 0, result.output
    assert "of 2 ranks" in result.output
    merged = json.loads(gzip.decompress(out.read_bytes()))
    assert {e["pid"] for e in merged["traceEvents"]} == {0, 1}

    first.write_text("{")
    result = CliRunner().invoke(main, ["merge-traces", str(out), str(first)])
    assert result.exit_code == 2
    assert "is no trace" in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"traceEvents": [{"ts": "1"}]}', "event 0 of "),
        ('{"traceEvents": [{"pid": [1]}]}', "event 0 of "),
        ('{"traceEvents": [{"ph": "M", "args": null}]}', "event 0 of "),
        ('{"traceEvents": [], "otherData": [1]}', "in.json is no object"),
        ('{"traceEvents": [], "otherData": {"rank": null}}', "rank None"),
        ('{"traceEvents": [], "otherData": {"started_unix_ns": "x"}}', "started_unix_ns 'x'"),
        ("[" * 100_000, "no trace"),
    ],
    ids=["ts", "pid", "args", "about", "rank", "clock", "deep"],
)
def test_files_that_are_no_traces_are_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "in.json").write_text(text)
    found = CliRunner().invoke(
        main, ["merge-traces", str(tmp_path / "out.json"), str(tmp_path / "in.json")]
    )
    assert found.exit_code == 2 and message in found.output
    assert not (tmp_path / "out.json").exists()


def test_the_trace_of_a_rank_is_not_written_over(tmp_path: Path) -> None:
    """OUTPUT was forgotten."""
    names = [str(tmp_path / f"rank{i}.json") for i in range(3)]
    for rank, name in enumerate(names):
        Path(name).write_text(json.dumps(trace(slice_of("a", 1.0), rank=rank)))
    before = Path(names[0]).read_text()
    found = CliRunner().invoke(main, ["merge-traces", *names])
    assert found.exit_code == 2 and "OUTPUT comes first" in found.output
    assert Path(names[0]).read_text() == before


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("[]")
    out = tmp_path / "missing" / "out.json"
    found = CliRunner().invoke(main, ["merge-traces", str(out), str(tmp_path / "in.json")])
    assert found.exit_code == 2 and "cannot be written: No such file or directory" in found.output
