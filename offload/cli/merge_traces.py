"""``offload merge-traces``: the timelines of several ranks as one, for Perfetto.

Traces are in the Trace Event Format. In the merged one the process number is the rank.
"""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from offload.cli import arguments
from offload.cli.terminal import save
from offload.profiler.chrome import STARTED

__all__ = ["command", "merged_trace"]

JsonObject = dict[str, Any]


def merged_trace(traces: Sequence[JsonObject | list[Any]], names: Sequence[str] = ()) -> JsonObject:
    """One trace with the events of all ranks.

    Args:
        traces: one of each rank, in the order of the ranks, unless they say ``rank`` in their
            ``otherData``. Each is an object with ``traceEvents``, or a list of events. Those that
            all say ``started_unix_ns`` are put on one clock; others begin together.
        names: of the traces, for messages.

    Returns:
        A trace whose process numbers are the ranks. Of a trace with several processes, the second
        one's number is its rank plus the number of traces, and so on.

    Raises:
        ValueError: two traces are of the same rank, or one is no trace.

    Example:
        >>> step = {"ph": "X", "name": "step", "pid": 1, "tid": 0, "ts": 0, "dur": 5}
        >>> merged = merged_trace([[step], [step]])
        >>> [e["pid"] for e in merged["traceEvents"] if e["name"] == "step"]
        [0, 1]
    """
    whole: list[JsonObject] = [t if isinstance(t, dict) else {"traceEvents": t} for t in traces]
    for number, trace in enumerate(whole):
        _check(trace, names[number] if names else f"trace {number}")
    about: list[JsonObject] = [trace.get("otherData") or {} for trace in whole]
    ranks = [int(a.get("rank", number)) for number, a in enumerate(about)]
    if len(set(ranks)) < len(ranks):
        raise ValueError(f"the traces are of ranks {ranks}: give each rank's once")
    starts = [a.get(STARTED) for a in about]
    known = [int(s) for s in starts if s is not None]
    first_ns = min(known) if len(known) == len(starts) and known else None
    events: list[JsonObject] = []
    for trace, rank, start_ns in zip(whole, ranks, starts, strict=True):
        shift_us = (int(start_ns or 0) - first_ns) / 1e3 if first_ns is not None else 0.0
        events += _of_rank(trace["traceEvents"], rank, max(len(whole), max(ranks) + 1), shift_us)
    other: JsonObject = {"ranks": sorted(ranks)}
    if first_ns is not None:
        other[STARTED] = first_ns
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _check(trace: JsonObject, name: str) -> None:
    """Refuse what the merging below could not read."""
    events = trace.get("traceEvents")
    if not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise ValueError(f"{name} has no list of traceEvents")
    for at, event in enumerate(events):
        if (
            not isinstance(event.get("ts", 0), (int, float))
            or not isinstance(event.get("pid"), (int, str, type(None)))
            or not isinstance(event.get("args", {}), dict)
        ):
            raise ValueError(f"event {at} of {name} is none of the Trace Event Format")
    about = trace.get("otherData") or {}
    if not isinstance(about, dict):
        raise ValueError(f"otherData of {name} is no object")
    for key in {"rank", STARTED} & about.keys():
        if not isinstance(about[key], int):
            raise ValueError(f"otherData of {name} has the {key} {about[key]!r}: no integer")


def _of_rank(
    events: Iterable[JsonObject], rank: int, stride: int, shift_us: float
) -> Iterable[JsonObject]:
    """Events with the process numbers, times and identities of one rank."""
    processes: dict[Any, int] = {}
    named: set[int] = set()
    for event in events:
        process = processes.setdefault(event.get("pid"), rank + stride * len(processes))
        moved = {**event, "pid": process}
        if "ts" in event:
            moved["ts"] = event["ts"] + shift_us
        if "id" in event:
            moved["id"] = f"{rank}.{event['id']}"
        if event.get("ph") == "M" and event.get("name") == "process_name":
            named.add(process)
            moved["args"] = {"name": f"rank {rank}: {event.get('args', {}).get('name', '')}"}
        if event.get("ph") == "M" and event.get("name") == "process_sort_index":
            continue
        yield moved
    for process in processes.values():
        about = {"ph": "M", "pid": process, "tid": 0}
        if process not in named:
            yield {**about, "name": "process_name", "args": {"name": f"rank {rank}"}}
        yield {**about, "name": "process_sort_index", "args": {"sort_index": process}}


@click.command("merge-traces", short_help="Put the timelines of several ranks into one file.")
@click.argument("output", type=arguments.OUTPUT_FILE)
@click.argument(
    "traces",
    nargs=-1,
    required=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
)
@click.option("--quiet", "-q", is_flag=True, help="Print nothing.")
def command(output: str, traces: tuple[Path, ...], quiet: bool) -> None:
    """Put the timelines of several ranks into one file, OUTPUT, which ui.perfetto.dev opens.

    TRACES are the ranks' files in the order of the ranks, JSON in the Trace Event Format, perhaps
    compressed (.gz). Exit status: 0 if it was written, 2 for wrong usage, 3 if it could not be.
    """
    try:
        _expect_no_rank(Path(output))
        merged = merged_trace([_read(path) for path in traces], [str(path) for path in traces])
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    data = json.dumps(merged).encode()
    save(output, gzip.compress(data) if output.endswith(".gz") else data)
    if not quiet:
        click.echo(f"{len(merged['traceEvents'])} events of {len(traces)} ranks in {output}")


def _expect_no_rank(output: Path) -> None:
    """Refuse to write over the trace of one rank: OUTPUT may have been forgotten."""
    there = None
    with contextlib.suppress(ValueError, OSError):  # it holds something else
        there = _read(output) if output.is_file() else None
    about = there.get("otherData") if isinstance(there, dict) else None
    if isinstance(about, dict) and "rank" in about:
        raise ValueError(
            f"{output} is the trace of a rank: OUTPUT comes first, and is another file"
        )


def _read(path: Path) -> Any:
    data = path.read_bytes()
    try:
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise ValueError(f"{path} is no trace: {error}") from None
    if not isinstance(found, (dict, list)):
        raise ValueError(f"{path} is no trace: it holds neither an object nor a list")
    return found
