"""Timeline: a trace as tracks of slices, one track a lane. Pure: events in, values out.

The track ``compute`` is what is left of the time between the moments of a step when the
computation did not run for our sake: its waits, and the copies that its own thread made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from offload.report.trace import (
    MOMENTS,
    TRANSFERS,
    WAITS,
    Event,
    Interval,
    Sample,
    Subject,
    merged,
)

__all__ = ["LANES", "Slice", "Timeline"]

LANES = ("compute", *TRANSFERS, *WAITS)
_PHASE_AFTER = {"begin": "forward", "forward": "forward", "backward": "backward", "end": "between"}


@dataclass(frozen=True)
class Slice:
    """A stretch of time on a track. Times are of ``time.perf_counter_ns``."""

    name: str
    start_ns: int
    end_ns: int
    row: int = 0  # of its track: slices of one row do not overlap
    nbytes: int = 0
    about: Subject | None = None

    @property
    def duration_ns(self) -> int:
        """Its length."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True)
class Timeline:
    """Tracks by the names of ``LANES``, the forwards of modules, and the memory in use."""

    tracks: dict[str, tuple[Slice, ...]]
    modules: tuple[Slice, ...]
    samples: tuple[Sample, ...]
    start_ns: int
    end_ns: int

    @classmethod
    def of(
        cls, events: Iterable[Event], samples: Iterable[Sample], *, host_copies: bool
    ) -> Timeline:
        """The timeline of a trace.

        Args:
            events: of a ``Trace``, in any order.
            samples: of the same.
            host_copies: whether the thread that trains makes the copies of ``offload`` itself, as
                it does on ``device="cpu"``.
        """
        ordered = sorted(events, key=lambda e: (e.start_ns, e.end_ns))
        busy = [e for e in ordered if e.name in TRANSFERS or e.name in WAITS]
        moments = [e for e in ordered if e.name in MOMENTS]
        ends = [e.end_ns for e in (*busy, *moments)]
        start_ns = moments[0].start_ns if moments else min((e.start_ns for e in busy), default=0)
        end_ns = max(ends, default=start_ns)
        stopped = {*WAITS, "offload"} if host_copies else set(WAITS)
        away = merged((e.start_ns, e.end_ns) for e in busy if e.name in stopped)
        tracks = {"compute": tuple(_compute(moments, away, end_ns))}
        for lane in LANES[1:]:
            tracks[lane] = tuple(_in_rows([_slice(e) for e in busy if e.name == lane]))
        modules = [_slice(e) for e in ordered if e.name == "module"]
        return cls(tracks, tuple(_in_rows(modules)), tuple(samples), start_ns, end_ns)

    @property
    def seconds(self) -> float:
        """Its length."""
        return (self.end_ns - self.start_ns) / 1e9


def _slice(event: Event) -> Slice:
    name = event.about.module if event.name == "module" and event.about else event.name
    return Slice(name, event.start_ns, event.end_ns, 0, event.nbytes, event.about)


def _in_rows(slices: list[Slice]) -> Iterator[Slice]:
    """The same, each in the first row that is free when it begins."""
    free_at_ns: list[int] = []
    for s in slices:
        row = next((i for i, ns in enumerate(free_at_ns) if ns <= s.start_ns), len(free_at_ns))
        if row == len(free_at_ns):
            free_at_ns.append(0)
        free_at_ns[row] = s.end_ns
        yield replace(s, row=row)


def _compute(moments: list[Event], away: list[Interval], end_ns: int) -> Iterator[Slice]:
    """From moment to moment, without the time that the computation was away."""
    ends_ns = [*(m.start_ns for m in moments[1:]), end_ns]
    for moment, until_ns in zip(moments, ends_ns[: len(moments)], strict=True):
        at_ns = moment.start_ns
        for start_ns, stop_ns in away:
            if stop_ns <= at_ns:
                continue
            if start_ns >= until_ns:
                break
            if start_ns > at_ns:
                yield Slice(_PHASE_AFTER[moment.name], at_ns, start_ns)
            at_ns = stop_ns
        if at_ns < until_ns:
            yield Slice(_PHASE_AFTER[moment.name], at_ns, until_ns)
