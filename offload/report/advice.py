"""What a report's figures say is wrong, and what to do: pure rules over values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from offload.units import format_bytes

if TYPE_CHECKING:
    from offload.report.step import StepReport

_WAITED_SHARE = 0.02  # of the step time; below it a wait is not worth a change
_HIDDEN_SHARE = 0.8  # of the transfer time
_MISSED_SHARE = 0.1  # of what backward asked for
_GIVEN_UP_SHARE = 0.25  # of what was meant to be written
_DRIVE_DAYS = 365


class Advice(NamedTuple):
    """Something to know, and something to do."""

    what: str
    hint: str


def advice_on(report: StepReport) -> list[Advice]:
    """The advice that ``report`` calls for, most important first."""
    if not report.steps:
        return []
    return [*_on_what_stays(report), *_on_waits(report), *_on_the_disk(report)]


def _on_what_stays(report: StepReport) -> Iterator[Advice]:
    if not report.offloaded_bytes:
        small, bundled = (report.kept_bytes.get(why, 0) for why in ("small", "bundle"))
        if not report.saved_bytes and bundled:
            hint = f"{format_bytes(bundled)} of small storages fill no bundle; lower bundle_bytes"
        elif not report.saved_bytes and small:
            hint = f"{format_bytes(small)} were in small storages; lower min_offload_bytes"
        elif report.saved_bytes:
            hint = (
                f"{format_bytes(report.saved_bytes)} stayed as the newest or for want of room; "
                "lower keep_last_bytes, or see what was kept"
            )
        else:
            hint = "the step saved nothing that may leave; run its forward inside the step"
        yield Advice("nothing was offloaded", hint)
    for reason, hint in (
        ("budget", "raise disk_budget or host_budget"),
        ("error", "see the warnings; the disk failed"),
    ):
        nbytes = report.kept_bytes.get(reason, 0)
        if nbytes:
            yield Advice(f"{format_bytes(nbytes)} stayed in memory for {reason}", hint)


def _on_waits(report: StepReport) -> Iterator[Advice]:
    step_seconds = report.seconds or 1.0
    asked = report.hits + report.lates + report.misses
    stalled = report.stall_seconds / step_seconds
    if stalled > _WAITED_SHARE:
        missed = report.misses / asked if asked else 0.0
        cause = f", {missed:.0%} of it not even called back" if missed > _MISSED_SHARE else ""
        yield Advice(
            f"{stalled:.0%} of the time went to waiting for bytes to come back{cause}",
            "raise prefetch_bytes, or recompute the modules that wait most",
        )
    held_up = report.backpressure_seconds / step_seconds
    if held_up > _WAITED_SHARE:
        yield Advice(
            f"{held_up:.0%} of the time forward waited for room",
            "raise window_bytes; if that does not help, layers compute too little for their bytes: "
            "keep or recompute the cheapest",
        )
    nothing_waited = stalled <= _WAITED_SHARE and held_up <= _WAITED_SHARE
    if report.overlap is not None and report.overlap < _HIDDEN_SHARE and not nothing_waited:
        yield Advice(
            f"only {report.overlap:.0%} of the transfer was hidden", "see what was waited for"
        )


def _on_the_disk(report: StepReport) -> Iterator[Advice]:
    meant_bytes = report.written_bytes + report.cancelled_bytes
    if report.cancelled_bytes > _GIVEN_UP_SHARE * meant_bytes:
        yield Advice(
            f"{format_bytes(report.cancelled_bytes)} were on their way to the disk when they were "
            "no longer wanted there",
            "raise keep_last_bytes: backward asks for the newest bytes at once",
        )
    days = report.drive_days()
    if days is not None and days < _DRIVE_DAYS:
        yield Advice(
            f"training on at this pace writes as much as a consumer drive is made for (600 TB) in "
            f"{days:,.1f} days",
            "use a drive made for writing (report.drive_days('10PB')), more host memory, or "
            "recomputation",
        )
