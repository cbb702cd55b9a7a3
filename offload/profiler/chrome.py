"""A profile in the Trace Event Format, which Perfetto and ``chrome://tracing`` open.

One process, one thread a lane and row; counters for the memory in use. Times are microseconds since
the first measured step began.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from offload.profiler.result import Profile, conditions
from offload.profiler.timeline import LANES, Slice

TRACE_FORMAT = 1
STARTED = "started_unix_ns"  # in "otherData": the time of day at which the trace's clock shows 0
_PROCESS = 1


def trace_of(profile: Profile) -> dict[str, Any]:
    """The whole document. It tells its rank and the time of day of its start, so that the traces
    of several ranks can be merged (``offload merge-traces``).
    """
    origin_ns = _origin_ns(profile)
    return {
        "traceEvents": list(_events(profile, origin_ns)),
        "displayTimeUnit": "ms",
        "otherData": {
            "format": TRACE_FORMAT,
            "name": profile.name,
            "steps": len(profile.reports),
            "rank": int(os.environ.get("RANK") or 0),
            STARTED: origin_ns + time.time_ns() - time.perf_counter_ns(),
            **{key: str(value) for key, value in conditions(profile.device).items()},
        },
    }


def _origin_ns(profile: Profile) -> int:
    return min([profile.timeline.start_ns, *(start for start, _ in profile.plain_steps)])


def _events(profile: Profile, origin_ns: int) -> Iterator[dict[str, Any]]:
    timeline = profile.timeline
    yield _named("process_name", 0, f"offload: {profile.name}")
    thread = 0
    groups: list[tuple[str, list[Slice]]] = [
        ("plain steps", [Slice("plain step", *span) for span in profile.plain_steps])
    ]
    if timeline.modules:
        groups.append(("modules", list(timeline.modules)))
    groups += [(lane, list(timeline.tracks[lane])) for lane in LANES if timeline.tracks[lane]]
    for name, slices in groups:
        # Forwards of modules lie within each other, which the format allows on one thread.
        rows = {0} if name == "modules" else {s.row for s in slices}
        for row in sorted(rows):
            thread += 1
            yield _named("thread_name", thread, name if row == 0 else f"{name} ({row + 1})")
            yield _event("M", thread, "thread_sort_index", args={"sort_index": thread})
            for s in slices:
                if s.row == row or name == "modules":
                    yield _complete(s, thread, name, origin_ns)
    for sample in timeline.samples:
        time_us = (sample.time_ns - origin_ns) / 1e3
        in_use = {
            "activations": {"bytes": sample.live_bytes},
            "host memory": {"bytes": sample.host_bytes},
            "disk": {"bytes": sample.disk_bytes},
        }
        for name, values in in_use.items():
            yield _event("C", 0, name, ts=time_us, args=values)


def _complete(s: Slice, thread: int, category: str, origin_ns: int) -> dict[str, Any]:
    args: dict[str, Any] = {}
    if s.nbytes:
        args["bytes"] = s.nbytes
        args["GB/s"] = round(s.nbytes / max(1, s.duration_ns), 3)
    if s.about is not None:
        if s.about.block >= 0:
            args["block"] = s.about.block
        for key in ("module", "operator"):
            value = getattr(s.about, key)
            if value:
                args[key] = value
        if s.about.tensor is not None:
            args["tensor"] = str(s.about.tensor)
    start_us, duration_us = (s.start_ns - origin_ns) / 1e3, s.duration_ns / 1e3
    return _event("X", thread, s.name, cat=category, ts=start_us, dur=duration_us, args=args)


def _named(what: str, thread: int, name: str) -> dict[str, Any]:
    return _event("M", thread, what, args={"name": name})


def _event(phase: str, thread: int, name: str, **more: Any) -> dict[str, Any]:
    return {"ph": phase, "pid": _PROCESS, "tid": thread, "name": name, **more}
