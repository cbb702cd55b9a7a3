"""A profile as one HTML page that needs no network: its drawing and tables are made here, its style
and its zooming are in ``page.html``.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files
from string import Template

from offload.profiler.colors import COLORS, lanes_shown
from offload.profiler.drawing import draw
from offload.profiler.result import Profile, conditions
from offload.report.step_tables import (
    LANE_HEADINGS,
    WAIT_HEADINGS,
    days_told,
    lane_rows,
    wait_row,
)
from offload.units import format_bytes, format_seconds

_MOST_WAITS = 15
_MEANINGS = {
    "forward": "computing, forward",
    "backward": "computing, backward",
    "offload": "offload: device to host memory",
    "reload": "reload: host memory to device",
    "spill": "spill: host memory to disk",
    "fetch": "fetch: disk to host memory",
    "stall": "stall: waiting for bytes",
    "backpressure": "backpressure: waiting for room",
    "module": "forward of a module",
}


def page_of(profile: Profile) -> str:
    """The whole page."""
    template = Template((files("offload.profiler") / "page.html").read_text(encoding="utf-8"))
    parts = {
        "title": escape(f"{profile.name} - offload profile"),
        "heading": f"Profile of {escape(profile.name)}",
        "conditions": _conditions(profile),
        "verdict": f"{escape(str(profile.verdict))}.",
        "cards": _cards(profile),
        "advice": _advice(profile),
        "timeline": draw(profile),
        "legend": _legend(profile),
        "lanes": _lanes(profile),
        "waits": _waits(profile),
        "modules": _modules(profile),
    }
    return template.substitute(parts)


def _conditions(profile: Profile) -> str:
    known = conditions(profile.device)
    options = ", ".join(f"{k}={v}" for k, v in profile.options.items()) or "defaults"
    return escape(
        f"{len(profile.reports)} pairs of steps after {profile.warmup} to warm up; device "
        f"{known['device']}, {known['cpus']} CPUs, {known['threads']} threads; torch "
        f"{known['torch']}, Python {known['python']}, Linux {known['kernel']}; options: {options}"
    )


def _cards(profile: Profile) -> str:
    report, steps = profile.report, len(profile.reports)
    overlap = profile.spread("overlap")
    cards = [
        (
            "no transfers" if overlap is None else f"{overlap.median:.1%}",
            f"of {format_seconds(report.transfer_seconds / steps)} of transfer a step was hidden",
        ),
        (
            f"{format_seconds(profile.plain.median)} → {format_seconds(profile.offloaded.median)}",
            "median step time, plain → offloaded"
            + ("" if profile.verdict.is_claimed else "; not shown to differ"),
        ),
        (
            f"{format_bytes(profile.plain_memory.peak_bytes)} → "
            f"{format_bytes(profile.offloaded_memory.peak_bytes)}",
            "activations alive, peak",
        ),
        (
            format_seconds((report.stall_seconds + report.backpressure_seconds) / steps),
            "waited a step",
        ),
    ]
    drive_days = report.drive_days()
    if drive_days is not None:
        cards.append(
            (
                f"{report.written_bytes_per_day / 1e12:,.1f} TB",
                "written to the disk in a day of such steps: "
                f"{days_told(drive_days)} of a drive made for 600 TB",
            )
        )
    card = '<div class="card"><b>{}</b><span>{}</span></div>'
    return "".join(card.format(escape(figure), escape(what)) for figure, what in cards)


def _advice(profile: Profile) -> str:
    items = [f"<li><b>{escape(a.what)}</b>: {escape(a.hint)}</li>" for a in profile.report.advice()]
    items += [f"<li>{escape(w)}</li>" for w in profile.report.warnings]
    return f'<ul class="advice">{"".join(items)}</ul>' if items else ""


def _legend(profile: Profile) -> str:
    lanes = lanes_shown(profile.shown)
    names = ["forward", "backward", *lanes[1:]]
    if profile.shown.modules:
        names.append("module")
    return "".join(
        f'<span><i style="background:{COLORS[name]}"></i>{escape(_MEANINGS[name])}</span>'
        for name in names
    )


def _lanes(profile: Profile) -> str:
    return _table(("lane", *LANE_HEADINGS), lane_rows(profile.report), text={0})


def _waits(profile: Profile) -> str:
    report = profile.report
    if not report.waits:
        return '<p class="note">Nothing: it never waited.</p>'
    longest = report.waits[0].seconds or 1.0
    rows = []
    for w in report.waits[:_MOST_WAITS]:
        width = max(1, round(120 * w.seconds / longest))
        bar = f'<span class="bar" style="width:{width}px"></span>'
        *cells, seconds = wait_row(w)
        rows.append((*cells, _Html(bar + escape(seconds))))
    headings = (*WAIT_HEADINGS, "times", "in all steps")
    table = _table(headings, rows, text={*range(len(WAIT_HEADINGS))})
    rest = report.waits[_MOST_WAITS:]
    if not rest:
        return table
    seconds = format_seconds(sum(w.seconds for w in rest))
    return f'{table}<p class="note">And {len(rest)} others, {seconds} together.</p>'


def _modules(profile: Profile) -> str:
    by_module = profile.report.waits_by_module
    if not any(by_module):
        return ""
    rows = [(m or "(none)", format_seconds(s)) for m, s in list(by_module.items())[:_MOST_WAITS]]
    table = _table(("module that saved the bytes", "waited, all steps"), rows, text={0})
    return f"<h2>Waits by module</h2>{table}"


class _Html(str):
    """A cell that is markup already."""


def _table(headings: Iterable[str], rows: Iterable[tuple[str, ...]], *, text: set[int]) -> str:
    def cell(tag: str, number: int, value: str) -> str:
        shown = value if isinstance(value, _Html) else escape(value)
        kind = ' class="text"' if number in text else ""
        return f"<{tag}{kind}>{shown}</{tag}>"

    head = "".join(cell("th", i, h) for i, h in enumerate(headings))
    body = "".join(
        f"<tr>{''.join(cell('td', i, v) for i, v in enumerate(row))}</tr>" for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
