"""StepReport: what a step moved, how much of it was hidden, and what it waited for."""

import io
import json
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

from rich.console import Console
from rich.table import Table

from offload.trace import Interval, intersection_ns, merged, total_ns
from offload.units import format_bytes, format_seconds

JSON_FORMAT = 1
_MAX_INTERVALS = 1 << 16  # per step; beyond it the oldest no longer count towards the overlap


def _intervals() -> "deque[Interval]":
    return deque(maxlen=_MAX_INTERVALS)


@dataclass
class Counters:
    """What is counted while a step runs. Values only: ``StepReport.of`` makes sense of them."""

    started_ns: int = field(default_factory=time.perf_counter_ns)
    ended_ns: int = 0  # 0 while the step's block is open
    offloaded_bytes: int = 0
    offloaded_blocks: int = 0
    written_bytes: int = 0
    read_bytes: int = 0
    reloaded_bytes: int = 0
    deduplicated_bytes: int = 0
    kept_bytes: "Counter[str]" = field(default_factory=Counter)
    hits: int = 0
    lates: int = 0
    misses: int = 0
    forwarded_bytes: int = 0
    cancelled_bytes: int = 0
    stall_ns: int = 0
    backpressure_ns: int = 0
    peak_arena_bytes: int = 0
    peak_live_bytes: int = 0
    peak_disk_bytes: int = 0
    warnings: "Counter[str]" = field(default_factory=Counter)
    transfers: "deque[Interval]" = field(default_factory=_intervals)
    waits: "deque[Interval]" = field(default_factory=_intervals)


@dataclass(frozen=True)
class StepReport:
    """The figures of one step, or of several added up. Sizes in bytes, times in seconds.

    Attributes:
        steps: how many steps these figures cover.
        seconds: wall time inside the steps' ``with`` blocks.
        offloaded_bytes: storages that left memory, each counted once.
        offloaded_blocks: how many they were.
        written_bytes: what really went to the disk, padded to whole pages.
        read_bytes: what really came back.
        reloaded_bytes: storages made on the device again.
        deduplicated_bytes: not moved again as another saved tensor shared the storage.
        kept_bytes: bytes that stayed in memory, by reason. ``small``: below the threshold.
            ``parameter``: a parameter, a view or an autocast copy of one. ``view``: a small part of
            a larger storage that needs no gradient. ``kind``: a kind of tensor that has no plain
            bytes. ``policy``, ``budget``, ``error``: so it was decided, there was no room, the disk
            failed. ``backward``: saved by backward itself. ``fork``: saved in a forked child.
        hits: backward asked for bytes that were there: in memory, or on the accelerator.
        lates: backward asked for bytes that were on their way.
        misses: backward asked for bytes whose way back had not begun.
        forwarded_bytes: asked for while still in memory, so that no read was needed.
        cancelled_bytes: transfers given up as nobody needed the bytes any more.
        stall_seconds: backward waiting for reads; on an accelerator also its computation waiting
            for copies, as its own clock tells.
        backpressure_seconds: forward waiting for room, likewise.
        transfer_seconds: time in which at least one transfer ran, disk or link.
        overlap: share of ``transfer_seconds`` in which the computation did not wait for us;
            ``None`` if nothing was transferred.
        peak_arena_bytes: most host memory in use by bytes on their way.
        peak_live_bytes: most bytes in saved storages and the arena together.
        peak_disk_bytes: most bytes in use on the disk.
        warnings: what went otherwise than configured.
    """

    steps: int
    seconds: float
    offloaded_bytes: int
    offloaded_blocks: int
    written_bytes: int
    read_bytes: int
    reloaded_bytes: int
    deduplicated_bytes: int
    kept_bytes: dict[str, int]
    hits: int
    lates: int
    misses: int
    forwarded_bytes: int
    cancelled_bytes: int
    stall_seconds: float
    backpressure_seconds: float
    transfer_seconds: float
    overlap: float | None
    peak_arena_bytes: int
    peak_live_bytes: int
    peak_disk_bytes: int
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, steps: Iterable[Counters]) -> "StepReport":
        """The report of one step's counters, or the sum (for peaks, the maximum) of several."""
        return cls.summed(_report_of_one(c) for c in steps)

    @classmethod
    def summed(cls, reports: "Iterable[StepReport]") -> "StepReport":
        """Add up reports: times and bytes add, peaks are the largest, the overlap is weighted by
        time.
        """
        parts = list(reports)
        hidden = sum(r.overlap * r.transfer_seconds for r in parts if r.overlap is not None)
        transfer = sum(r.transfer_seconds for r in parts)
        kept: Counter[str] = Counter()
        for r in parts:
            kept.update(r.kept_bytes)
        values: dict[str, Any] = {
            "kept_bytes": dict(kept),
            "overlap": hidden / transfer if transfer else None,
            "warnings": tuple(dict.fromkeys(w for r in parts for w in r.warnings)),
        }
        for f in fields(cls):
            if f.name not in values:
                combine = max if f.name.startswith("peak_") else sum
                values[f.name] = combine([getattr(r, f.name) for r in parts] or [0])
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every field, plus the number of the format."""
        return {"format": JSON_FORMAT, **{f.name: getattr(self, f.name) for f in fields(self)}}

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        out = io.StringIO()
        Console(file=out, width=100).print(self.table())
        return out.getvalue().rstrip()

    def table(self) -> Table:
        """The figures for people, as a ``rich`` table."""
        table = Table(
            title=f"offload: {self.steps} step{'s' if self.steps != 1 else ''}", show_header=False
        )
        table.add_column(style="bold")
        table.add_column()
        overlap = (
            "no transfers"
            if self.overlap is None
            else f"{self.overlap:.1%} of {format_seconds(self.transfer_seconds)}"
        )
        kept = ", ".join(
            f"{format_bytes(n)} {why}"
            for why, n in sorted(self.kept_bytes.items(), key=lambda i: -i[1])
        )
        size, span = format_bytes, format_seconds
        rows = {
            "step time": span(self.seconds),
            "offloaded": f"{size(self.offloaded_bytes)} in {self.offloaded_blocks} storages",
            "written / read": f"{size(self.written_bytes)} / {size(self.read_bytes)}",
            "not moved": f"{size(self.deduplicated_bytes)} shared, "
            f"{size(self.forwarded_bytes)} still in memory, "
            f"{size(self.cancelled_bytes)} of writes given up",
            "kept": kept or "nothing",
            "backward found": f"{self.hits} there, {self.lates} on their way, "
            f"{self.misses} not yet called back",
            "transfer hidden": overlap,
            "waited": f"{span(self.stall_seconds)} for reads, "
            f"{span(self.backpressure_seconds)} for room",
            "peaks": f"{size(self.peak_live_bytes)} live, {size(self.peak_arena_bytes)} arena, "
            f"{size(self.peak_disk_bytes)} disk",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        for warning in self.warnings:
            table.add_row("warning", warning, style="yellow")
        return table


def _report_of_one(c: Counters) -> StepReport:
    transfers, waits = merged(c.transfers), merged(c.waits)
    transfer_ns = total_ns(transfers)
    counted = {f.name: getattr(c, f.name) for f in fields(StepReport) if hasattr(c, f.name)}
    counted.update(
        steps=1,
        seconds=((c.ended_ns or time.perf_counter_ns()) - c.started_ns) / 1e9,
        kept_bytes=dict(c.kept_bytes),
        stall_seconds=c.stall_ns / 1e9,
        backpressure_seconds=c.backpressure_ns / 1e9,
        transfer_seconds=transfer_ns / 1e9,
        overlap=1 - intersection_ns(transfers, waits) / transfer_ns if transfer_ns else None,
        warnings=tuple(c.warnings),
    )
    return StepReport(**counted)
