"""A profile as a PNG: the timeline of the step that is shown, and its memory. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offload.profiler.colors import COLORS, lanes_shown
from offload.profiler.figures import drawn, titled
from offload.profiler.result import MemoryCurve, Profile
from offload.system.files import write_whole
from offload.units import MIB

_ROW_INCHES = 0.32


def save_picture(profile: Profile, path: Path) -> None:
    """Write the picture to ``path``.

    Raises:
        ModuleNotFoundError: matplotlib is missing.
        OSError: it cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "a PNG needs matplotlib: pip install 'offload[plot]'", name=error.name
        ) from None
    lanes = lanes_shown(profile.shown)
    height = _ROW_INCHES * len(lanes)
    figure = Figure(figsize=(11, height + 3.6), layout="constrained")
    axes: Any = figure.subplots(2, 1, sharex=True, height_ratios=[height, 2.6])
    _draw_lanes(axes[0], profile, lanes)
    _draw_memory(axes[1], profile)
    figure.suptitle(titled(f"{profile.name}: {profile.verdict}"), fontsize=10, wrap=True)
    write_whole(path, drawn(figure, "png"))


def _draw_lanes(axes: Any, profile: Profile, lanes: list[str]) -> None:
    from matplotlib.patches import Patch

    shown = profile.shown
    for y, lane in enumerate(lanes):
        for name in dict.fromkeys(s.name for s in shown.tracks[lane]):
            spans = [
                ((s.start_ns - shown.start_ns) / 1e6, s.duration_ns / 1e6)
                for s in shown.tracks[lane]
                if s.name == name
            ]
            axes.broken_barh(spans, (y - 0.38, 0.76), color=COLORS[name], linewidth=0)
    phases: list[Any] = [Patch(color=COLORS[p], label=p) for p in ("forward", "backward")]
    axes.legend(
        handles=phases, frameon=False, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0)
    )
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_memory(axes: Any, profile: Profile) -> None:
    for curve, label, color in (
        (profile.plain_memory, "plain", COLORS["plain"]),
        (profile.offloaded_memory, "offloaded", COLORS["backward"]),
    ):
        times, values = _steps(curve)
        axes.fill_between(times, values, step="post", color=color, alpha=0.25, linewidth=0)
        peak = curve.peak_bytes / MIB
        axes.step(times, values, where="post", color=color, label=f"{label}, peak {peak:,.1f} MiB")
    axes.set_ylabel("activations alive, MiB")
    axes.set_xlabel("ms since the step began")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, loc="upper right")
    axes.spines[["top", "right"]].set_visible(False)


def _steps(curve: MemoryCurve) -> tuple[list[float], list[float]]:
    times = [ns / 1e6 for ns, _ in curve.points]
    return times, [nbytes / MIB for _, nbytes in curve.points]
