"""A report for monitoring: flat scalars, and the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offload.report.step import StepReport

# Fields that add up from step to step, with what they are; peaks and ratios follow below.
_TOTALS = {
    "steps": "Training steps.",
    "seconds": "Wall time inside steps.",
    "period_seconds": "Wall time from the first step to the last, what is between them included.",
    "saved_bytes": "Storages saved for backward that were considered.",
    "offloaded_bytes": "Storages that left memory.",
    "offloaded_blocks": "How many they were.",
    "written_bytes": "Written to the disk.",
    "read_bytes": "Read from the disk.",
    "reloaded_bytes": "Made on the device again.",
    "deduplicated_bytes": "Not moved again as another saved tensor shared the storage.",
    "forwarded_bytes": "Asked for while still in memory.",
    "cancelled_bytes": "Transfers given up.",
    "hits": "Asked for and there.",
    "lates": "Asked for and on their way.",
    "misses": "Asked for before their way back had begun.",
    "stall_seconds": "Computation waiting for bytes to come back.",
    "backpressure_seconds": "Computation waiting for room.",
    "transfer_seconds": "Time in which a transfer ran.",
}
_PEAKS = {
    "peak_device_bytes": "Most device memory allocated by torch.",
    "peak_live_bytes": "Most bytes in saved storages and the arena.",
    "peak_arena_bytes": "Most host memory in use by bytes on their way.",
    "peak_disk_bytes": "Most bytes in use on the disk.",
}


def scalars(report: StepReport, prefix: str) -> dict[str, float]:
    """See ``StepReport.scalars``."""
    steps = max(1, report.steps)
    found: dict[str, float] = {"steps": report.steps}
    for name in _TOTALS:
        if name != "steps":
            found[name] = getattr(report, name) / steps
    for name in _PEAKS:
        found[name] = getattr(report, name)
    for reason, nbytes in report.kept_bytes.items():
        found[f"kept/{reason}_bytes"] = nbytes / steps
    for name, traffic in report.lanes.items():
        found[f"{name}/bytes"] = traffic.nbytes / steps
        found[f"{name}/peak_depth"] = traffic.peak_depth
        if traffic.bytes_per_s is not None:
            found[f"{name}/bytes_per_s"] = traffic.bytes_per_s
    if report.overlap is not None:
        found["overlap"] = report.overlap
    found["written_bytes_per_day"] = report.written_bytes_per_day
    found["warnings"] = len(report.warnings)
    return {f"{prefix}{name}": float(value) for name, value in found.items()}


def prometheus(report: StepReport, labels: Mapping[str, str]) -> str:
    """See ``StepReport.prometheus``."""
    lines: list[str] = []

    def family(name: str, kind: str, explanation: str) -> str:
        lines.append(f"# HELP offload_{name} {explanation}")
        lines.append(f"# TYPE offload_{name} {kind}")
        return f"offload_{name}"

    def sample(name: str, value: float, **more: str) -> None:
        lines.append(f"{name}{_labels({**labels, **more})} {value!r}")

    for field, explanation in _TOTALS.items():
        sample(family(f"{field}_total", "counter", explanation), getattr(report, field))
    for field, explanation in _PEAKS.items():
        sample(family(field, "gauge", explanation), getattr(report, field))
    name = family("overlap_ratio", "gauge", "Share of transfer time that was hidden.")
    if report.overlap is not None:
        sample(name, report.overlap)
    name = family("kept_bytes_total", "counter", "Stayed in memory, by reason.")
    for reason, nbytes in report.kept_bytes.items():
        sample(name, nbytes, reason=reason)
    for figure, kind, explanation in (
        ("nbytes", "bytes_total", "Bytes over a lane."),
        ("operations", "operations_total", "Transfers over a lane."),
        ("seconds", "busy_seconds_total", "Time in which a transfer of the lane ran."),
    ):
        name = family(f"lane_{kind}", "counter", explanation)
        for lane, traffic in report.lanes.items():
            sample(name, getattr(traffic, figure), lane=lane)
    name = family("lane_peak_depth", "gauge", "Most transfers of a lane on their way at one time.")
    for lane, traffic in report.lanes.items():
        sample(name, traffic.peak_depth, lane=lane)
    sample(family("warnings", "gauge", "Different warnings so far."), len(report.warnings))
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(value: str) -> str:
    return str(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
