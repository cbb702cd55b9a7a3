"""The rates that a plan is made for: measured while the model trains, else remembered."""

from __future__ import annotations

from collections.abc import Mapping

from offload.config import Config
from offload.planner.model import Links
from offload.probe.profile import load_profile
from offload.report import LaneCounters
from offload.report.trace import merged, total_ns

__all__ = ["measured_links", "remembered_links"]

_LEAST_BYTES = 1 << 20  # of transfers, to tell a rate from


def measured_links(lanes: Mapping[str, LaneCounters], known: Links, given: Links) -> Links:
    """Bytes a second of each way, while it was busy: where there is enough to tell, else what is
    known, else what is given.
    """
    names = {
        "link_out": "offload", "link_in": "reload", "disk_write": "spill", "disk_read": "fetch",
    }  # fmt: skip
    rates: dict[str, float | None] = {}
    for way, name in names.items():
        figures = lanes[name]
        busy_ns = total_ns(merged(figures.intervals))
        measured = figures.nbytes / busy_ns * 1e9 if busy_ns else None
        other = getattr(known, way) or getattr(given, way)
        enough = measured is not None and (figures.nbytes >= _LEAST_BYTES or other is None)
        rates[way] = measured if enough else other
    return Links(**rates)


def remembered_links(config: Config) -> Links:
    """The rates that ``offload probe`` has found on this machine, for ways over which the measured
    steps send nothing. Nothing is measured here: without a probe they are not known.
    """
    profile = load_profile(config)
    if profile is None:
        return Links()
    profile = profile.at(config.io_threads, config.io_block_bytes)
    return Links(
        link_out=profile.link_out_bytes_per_s,
        link_in=profile.link_in_bytes_per_s,
        disk_write=profile.disk_write_bytes_per_s,
        disk_read=profile.disk_read_bytes_per_s,
    )
