"""Profile: what was measured of a step, without and with offloading, and how it is shown."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Group

from offload.measure import Spread
from offload.profiler.timeline import Timeline
from offload.profiler.verdict import Verdict
from offload.report import StepReport
from offload.report.step_tables import parts
from offload.report.tables import FigureTable, Prose, text_of
from offload.system.files import write_whole
from offload.units import format_bytes, format_seconds

__all__ = ["MemoryCurve", "Profile"]

JSON_FORMAT = 1


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes of saved activations alive over one step.

    Attributes:
        points: nanoseconds since the step began, and bytes from then on.
        seconds: length of the step.
    """

    points: tuple[tuple[int, int], ...]
    seconds: float

    @classmethod
    def of(cls, seen: Sequence[tuple[int, int]], start_ns: int, end_ns: int) -> MemoryCurve:
        """The curve of what was ``seen``: times and bytes."""
        points = tuple((t - start_ns, n) for t, n in seen if start_ns <= t <= end_ns)
        return cls(points, (end_ns - start_ns) / 1e9)

    @property
    def peak_bytes(self) -> int:
        """The most."""
        return max((nbytes for _, nbytes in self.points), default=0)


@dataclass(frozen=True)
class Profile:
    """What ``profile`` measured.

    Attributes:
        name: of the step.
        device: whose activations were managed.
        options: of the session, as given.
        warmup: pairs of steps that were run before and left out.
        plain_seconds: time of each plain step.
        offloaded_seconds: time of each offloaded step, in the same order.
        reports: of each offloaded step.
        plain_steps: from when to when each plain step ran, on the scale of the timeline.
        timeline: of all measured steps.
        shown: of another offloaded step, the fastest of three that ran under a meter of the memory.
        plain_memory: of another plain step, likewise.
        offloaded_memory: of the step that is shown.
    """

    name: str
    device: str
    options: dict[str, str]
    warmup: int
    plain_seconds: tuple[float, ...]
    offloaded_seconds: tuple[float, ...]
    reports: tuple[StepReport, ...]
    plain_steps: tuple[tuple[int, int], ...]
    timeline: Timeline
    shown: Timeline
    plain_memory: MemoryCurve
    offloaded_memory: MemoryCurve

    @cached_property
    def report(self) -> StepReport:
        """The offloaded steps added up, as if no plain step had come between them."""
        added_up = StepReport.summed(self.reports)
        return replace(added_up, period_seconds=sum(self.offloaded_seconds))

    @property
    def verdict(self) -> Verdict:
        """What the step times allow to say."""
        return Verdict.of(self.plain_seconds, self.offloaded_seconds)

    @property
    def plain(self) -> Spread:
        """Step times without offloading."""
        return Spread.of(self.plain_seconds)

    @property
    def offloaded(self) -> Spread:
        """Step times with offloading."""
        return Spread.of(self.offloaded_seconds)

    def spread(self, figure: str) -> Spread | None:
        """Median and range over the steps of one of ``StepReport.scalars``, without its prefix;
        ``None`` if no step has it.
        """
        scalars = [r.scalars(prefix="") for r in self.reports]
        values = [s[figure] for s in scalars if figure in s]
        return Spread.of(values) if values else None

    # -- in other forms ----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything but the timelines, plus the number of the format and the conditions."""
        verdict = self.verdict
        return {
            "format": JSON_FORMAT,
            "name": self.name,
            "conditions": conditions(self.device),
            "options": self.options,
            "warmup": self.warmup,
            "plain_seconds": list(self.plain_seconds),
            "offloaded_seconds": list(self.offloaded_seconds),
            "plain": asdict(self.plain),
            "offloaded": asdict(self.offloaded),
            "verdict": {
                **asdict(verdict), "is_claimed": verdict.is_claimed, "told": str(verdict),
            },
            "plain_peak_live_bytes": self.plain_memory.peak_bytes,
            "offloaded_peak_live_bytes": self.offloaded_memory.peak_bytes,
            "report": self.report.to_dict(),
            "steps": [r.to_dict() for r in self.reports],
            "advice": [a._asdict() for a in self.report.advice()],
        }  # fmt: skip

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def trace(self) -> dict[str, Any]:
        """All measured steps in the format of Chrome's trace viewer and of Perfetto."""
        from offload.profiler.chrome import trace_of

        return trace_of(self)

    def page(self) -> str:
        """One HTML page that needs nothing else: verdict, timeline, memory, stalls."""
        from offload.profiler.page import page_of

        return page_of(self)

    def save(self, directory: str | os.PathLike[str], *, png: bool = False) -> list[Path]:
        """Write ``trace.json``, ``profile.html``, ``profile.json`` and, if asked for,
        ``profile.png``.

        Args:
            directory: is made if it does not exist.
            png: needs matplotlib, which ``pip install offload[plot]`` brings.

        Returns:
            The files.

        Raises:
            ModuleNotFoundError: matplotlib is missing.
            OSError: a file cannot be written.
        """
        into = Path(directory)
        into.mkdir(parents=True, exist_ok=True)
        texts = {
            "profile.html": self.page(),
            "profile.json": self.to_json(),
            "trace.json": json.dumps(self.trace()),
        }
        for name, text in texts.items():
            write_whole(into / name, text)
        files = [into / name for name in texts]
        if png:
            from offload.profiler.picture import save_picture

            save_picture(self, into / "profile.png")
            files.append(into / "profile.png")
        return files

    def __str__(self) -> str:
        return text_of(self.renderable())

    def renderable(self) -> Group:
        """The profile for people, for a ``rich`` console."""
        return Group(_summary(self), *parts(self.report), Prose(f"{self.verdict}.", style="bold"))


def conditions(device: str) -> dict[str, Any]:
    """What figures depend on."""
    return {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def _summary(profile: Profile) -> FigureTable:
    pairs = profile.verdict.pairs
    title = f"{profile.name}: {pairs} pairs of steps after {profile.warmup} to warm up"
    table = FigureTable(title=title)
    table.add_column("median [range]", style="bold")
    table.add_figures("plain", "offloaded")
    times = (told(profile.plain, format_seconds), told(profile.offloaded, format_seconds))
    table.add_row("step time", *times)
    peaks = (profile.plain_memory.peak_bytes, profile.offloaded_memory.peak_bytes)
    table.add_row("activations alive, peak", *map(format_bytes, peaks))
    for label, figure, show in (
        ("transfer hidden", "overlap", "{:.1%}".format),
        ("waited for bytes", "stall_seconds", format_seconds),
        ("waited for room", "backpressure_seconds", format_seconds),
    ):
        spread = profile.spread(figure)
        if spread is not None:
            table.add_row(label, "", told(spread, show))
    return table


def told(spread: Spread, show: Any) -> str:
    """A spread for people: ``median [low - high]``, where a line breaks before the range only."""
    span = f"[{show(spread.low)} - {show(spread.high)}]"
    return f"{show(spread.median)} " + span.replace(" ", "\u00a0")
