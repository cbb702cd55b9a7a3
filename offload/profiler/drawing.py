"""The drawing of a profile's page: lanes over time, and the memory below them, as SVG.

All that zooms is in groups of the class ``zoom``, in which x runs from 0 to the width of the plot;
the script of the page moves and stretches those groups and draws the ticks. Without a script the
drawing stands as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from offload.profiler.colors import COLORS, lanes_shown
from offload.profiler.result import MemoryCurve, Profile
from offload.profiler.timeline import Slice
from offload.units import format_bytes, format_rate, format_seconds

_LEFT, _WIDTH, _RIGHT = 110, 1070, 20
_ROW, _GAP = 14, 8  # of a row of slices; between lanes
_MEMORY_HEIGHT = 190
_MOST_ROWS = 6  # of one lane; more are drawn in the last
_NARROWEST = 0.4  # a slice is drawn at least this wide


def draw(profile: Profile) -> str:
    """The SVG element."""
    shown = profile.shown
    spans = (shown.seconds, profile.plain_memory.seconds, profile.offloaded_memory.seconds)
    span_ns = max(1, int(1e9 * max(spans)))
    lanes: list[tuple[str, Sequence[Slice]]] = [(n, shown.tracks[n]) for n in lanes_shown(shown)]
    if shown.modules:
        lanes.insert(1, ("modules", shown.modules))
    parts: list[str] = []
    y = top = 10.0
    for name, slices in lanes:
        rows = min(_MOST_ROWS, 1 + max((s.row for s in slices), default=0))
        label_y = y + rows * _ROW / 2 + 4
        parts.append(f'<text x="{_LEFT - 10}" y="{label_y:.1f}" text-anchor="end">{name}</text>')
        parts.append('<g clip-path="url(#plot)">')
        kind = "zoom nested" if name == "modules" else "zoom"
        parts.append(_zoomed(_rects(slices, y, shown.start_ns, span_ns, name), kind))
        parts.append("</g>")
        y += rows * _ROW + _GAP
    memory_top = y + 40
    bottom = memory_top + _MEMORY_HEIGHT
    parts.append(_memory(profile, memory_top, bottom, span_ns))
    width, height = _LEFT + _WIDTH + _RIGHT, bottom + 44
    return (
        f'<svg class="timeline" viewBox="0 0 {width} {height:.0f}" role="img" '
        f'aria-label="lanes and memory over one step" data-left="{_LEFT}" data-width="{_WIDTH}" '
        f'data-top="{top:.0f}" data-bottom="{bottom:.0f}" data-span="{span_ns / 1e6:.6f}">'
        f'<clipPath id="plot"><rect x="{_LEFT}" y="0" width="{_WIDTH}" height="{bottom + 2:.0f}"/>'
        f'</clipPath><g class="ticks"></g>{"".join(parts)}'
        f'<text class="soft" x="{_LEFT + _WIDTH / 2}" y="{bottom + 38:.0f}" text-anchor="middle">'
        f"ms since the step began</text></svg>"
    )


def _zoomed(inner: Iterable[str], kind: str = "zoom") -> str:
    return f'<g class="{kind}" transform="translate({_LEFT} 0)">{"".join(inner)}</g>'


def _rects(
    slices: Sequence[Slice], y: float, start_ns: int, span_ns: int, lane: str
) -> Iterable[str]:
    for s in slices:
        x = (s.start_ns - start_ns) / span_ns * _WIDTH
        width = max(_NARROWEST, s.duration_ns / span_ns * _WIDTH)
        row = min(s.row, _MOST_ROWS - 1)
        color = COLORS["module" if lane == "modules" else s.name]
        yield (
            f'<rect x="{x:.2f}" y="{y + row * _ROW:.1f}" width="{width:.2f}" height="{_ROW - 1}" '
            f'fill="{color}"><title>{escape(_told(s, start_ns))}</title></rect>'
        )


def _told(s: Slice, start_ns: int) -> str:
    """What a slice says of itself."""
    at = format_seconds((s.start_ns - start_ns) / 1e9)
    lines = [f"{s.name}: {format_seconds(s.duration_ns / 1e9)}, from {at}"]
    if s.nbytes:
        rate = format_rate(s.nbytes / max(1, s.duration_ns) * 1e9)
        lines.append(f"{format_bytes(s.nbytes)} at {rate}")
    if s.about is not None and s.name != s.about.module:
        lines += [part for part in (s.about.module, s.about.operator) if part]
        if s.about.tensor is not None:
            lines.append(str(s.about.tensor))
    return "\n".join(lines)


# -- memory ---------------------------------------------------------------------------------------


def _memory(profile: Profile, top: float, bottom: float, span_ns: int) -> str:
    curves = (
        ("plain", profile.plain_memory, COLORS["plain"]),
        ("offloaded", profile.offloaded_memory, COLORS["backward"]),
    )
    step = _nice_step(max(curve.peak_bytes for _, curve, _ in curves))
    most = step * (1 + max(curve.peak_bytes for _, curve, _ in curves) // step)
    parts = []
    for nbytes in range(0, most + 1, step):
        y = bottom - (bottom - top) * nbytes / most
        parts.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        parts.append(
            f'<text class="soft" x="{_LEFT - 10}" y="{y + 4:.1f}" text-anchor="end">'
            f"{format_bytes(nbytes)}</text>"
        )
    drawn = []
    for _, curve, color in curves:
        points = _points(curve, top, bottom, most, span_ns)
        if points:
            line = " ".join(f"{x:.2f},{y:.1f}" for x, y in points)
            ends = f"{points[-1][0]:.2f},{bottom:.1f} {points[0][0]:.2f},{bottom:.1f}"
            drawn.append(f'<polygon class="area" fill="{color}" points="{line} {ends}"/>')
            drawn.append(f'<polyline class="curve" stroke="{color}" points="{line}"/>')
    parts.append(f'<g clip-path="url(#plot)">{_zoomed(drawn)}</g>')
    x = _LEFT + 14.0
    for name, curve, color in curves:
        label = f"activations alive, {name}: peak {format_bytes(curve.peak_bytes)}"
        parts.append(f'<rect x="{x}" y="{top - 20:.1f}" width="14" height="4" fill="{color}"/>')
        parts.append(f'<text x="{x + 20}" y="{top - 14:.1f}">{escape(label)}</text>')
        x += 330
    return "".join(parts)


def _points(
    curve: MemoryCurve, top: float, bottom: float, most: int, span_ns: int
) -> list[tuple[float, float]]:
    """A staircase: the bytes stay until they change."""
    found: list[tuple[float, float]] = []
    for time_ns, nbytes in curve.points:
        x = time_ns / span_ns * _WIDTH
        y = bottom - (bottom - top) * nbytes / most
        if found:
            found.append((x, found[-1][1]))
        found.append((x, y))
    return found


def _nice_step(peak_bytes: int) -> int:
    """A power of two, for three to six lines below the peak."""
    step = 1
    while peak_bytes // step > 5:
        step *= 2
    return step
