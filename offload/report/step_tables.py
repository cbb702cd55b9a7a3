"""A report as tables for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import RenderableType

from offload.report.tables import FigureTable, Prose
from offload.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from offload.report.step import StepReport, Wait

LANE_HEADINGS = ("bytes", "transfers", "busy", "rate", "deepest queue")
WAIT_HEADINGS = ("for", "of module", "asked for by", "tensor")
_MOST_WAITS = 8  # listed; the rest is in the report's ``waits``


def parts(report: StepReport) -> Iterator[RenderableType]:
    """All of a report: the main figures, the lanes, what was waited for, and advice."""
    yield summary(report)
    if any(traffic.operations for traffic in report.lanes.values()):
        yield lanes(report)
    if report.waits:
        yield waits(report)
    for advice in report.advice():
        yield Prose(f"{advice.what}: {advice.hint}", style="yellow")


def summary(report: StepReport) -> FigureTable:
    """The main figures, one a row."""
    title = f"offload: {report.steps} step{'s' if report.steps != 1 else ''}"
    table = FigureTable.of_facts(title, _rows(report))
    for warning in report.warnings:
        table.add_row("warning", warning, style="yellow")
    return table


def _rows(report: StepReport) -> dict[str, str]:
    size, span = format_bytes, format_seconds
    kept = ", ".join(
        f"{size(n)} {why}" for why, n in sorted(report.kept_bytes.items(), key=lambda i: -i[1])
    )
    overlap = (
        "no transfers"
        if report.overlap is None
        else f"{report.overlap:.1%} of {span(report.transfer_seconds)}"
    )
    device = f"{size(report.peak_device_bytes)} device, " if report.peak_device_bytes else ""
    rows = {
        "step time": span(report.seconds) + _each(report),
        "offloaded": f"{size(report.offloaded_bytes)} in {report.offloaded_blocks} storages",
        "written / read": f"{size(report.written_bytes)} / {size(report.read_bytes)}",
        "not moved": f"{size(report.deduplicated_bytes)} shared, "
        f"{size(report.forwarded_bytes)} still in memory, "
        f"{size(report.cancelled_bytes)} of writes given up",
        "kept": kept or "nothing",
        "backward found": f"{report.hits} there, {report.lates} on their way, "
        f"{report.misses} not yet called back",
        "transfer hidden": overlap,
        "waited": f"{span(report.stall_seconds)} for reads, "
        f"{span(report.backpressure_seconds)} for room",
        "peaks": f"{device}{size(report.peak_live_bytes)} live, "
        f"{size(report.peak_arena_bytes)} arena, {size(report.peak_disk_bytes)} disk",
    }
    days = report.drive_days()
    if days is not None:
        rows["drive"] = (
            f"{size(report.written_bytes / report.steps)} a step, "
            f"{report.written_bytes_per_day / 1e12:,.1f} TB a day at this pace: "
            f"{days_told(days)} of a drive made for 600 TB"
        )
    return rows


def _each(report: StepReport) -> str:
    each = format_seconds(report.seconds / max(1, report.steps))
    return f", {each} each" if report.steps > 1 else ""


def days_told(days: float) -> str:
    """A span of days for people."""
    return f"{days:,.1f} days" if days < 1000 else f"{days / 365.25:,.0f} years"


def lanes(report: StepReport) -> FigureTable:
    """What went over each lane."""
    table = FigureTable(title="lanes")
    table.add_column(style="bold")
    table.add_figures(*LANE_HEADINGS)
    for row in lane_rows(report):
        table.add_row(*row)
    return table


def lane_rows(report: StepReport) -> list[tuple[str, ...]]:
    """Of the lanes that were used: the name, and what ``LANE_HEADINGS`` says."""
    return [
        (
            name,
            format_bytes(traffic.nbytes),
            f"{traffic.operations:,}",
            format_seconds(traffic.seconds),
            format_rate(traffic.bytes_per_s or 0.0),
            str(traffic.peak_depth),
        )
        for name, traffic in report.lanes.items()
        if traffic.operations
    ]


def waits(report: StepReport) -> FigureTable:
    """What the computation waited for, longest first."""
    table = FigureTable(title="what the computation waited for")
    for heading in WAIT_HEADINGS:
        table.add_column(heading)
    table.add_figures("times", "in all")
    for wait in report.waits[:_MOST_WAITS]:
        kind, module, operator, tensor, count, seconds = wait_row(wait)
        table.add_row(kind, module, operator, tensor.replace(" ", "\u00a0"), count, seconds)
    others = report.waits[_MOST_WAITS:]
    if others:
        seconds = format_seconds(sum(w.seconds for w in others))
        table.add_row(
            f"{len(others)} others", "", "", "", str(sum(w.count for w in others)), seconds
        )
    return table


def wait_row(wait: Wait) -> tuple[str, str, str, str, str, str]:
    """What ``WAIT_HEADINGS`` says, then how often and how long."""
    kind = "bytes" if wait.kind == "stall" else "room"
    operator = wait.operator.removesuffix("Backward0")  # autograd's names all end alike
    seconds = format_seconds(wait.seconds)
    return kind, wait.module, operator, wait.tensor, f"{wait.count:,}", seconds
