"""The reports of several ranks side by side: least, median, most, and who holds up the others."""

from __future__ import annotations

import json
import socket
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist

from offload.report import StepReport
from offload.report.tables import FigureTable, text_of
from offload.units import format_bytes, format_seconds

__all__ = ["Figure", "RankReports", "Straggler", "gather"]

JSON_FORMAT = 1
_TELLING_SHARE = 0.05  # of a step: a rank that loses less more than the others holds nobody up


@dataclass(frozen=True)
class Figure:
    """One field of a report over all ranks, and who has its extremes.

    Example:
        >>> Figure.of([3.0, 1.0, 2.0])
        Figure(low=1.0, median=2.0, high=3.0, low_rank=1, high_rank=0)
    """

    low: float
    median: float
    high: float
    low_rank: int
    high_rank: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Figure:
        """The figure of one value for each rank."""
        low, high = min(values), max(values)
        median = statistics.median(values)
        return cls(low, median, high, values.index(low), values.index(high))


@dataclass(frozen=True)
class Straggler:
    """The rank that waits for its transfers longest, and so holds up the others."""

    rank: int
    host: str
    waited_seconds: float
    median_seconds: float  # that a rank has waited


@dataclass(frozen=True)
class RankReports:
    """The reports of the ranks of a group, in their order.

    Attributes:
        reports: one of each rank.
        hosts: the names of the machines they run on.
    """

    reports: tuple[StepReport, ...]
    hosts: tuple[str, ...]

    @property
    def figures(self) -> dict[str, Figure]:
        """Every number of a report over the ranks, by the name of its field; none that a rank
        lacks, as one without transfers has no overlap.
        """
        values = {f.name: [getattr(r, f.name) for r in self.reports] for f in fields(StepReport)}
        numbers = {
            name: [v for v in of_ranks if isinstance(v, (int, float))]
            for name, of_ranks in values.items()
        }
        return {
            name: Figure.of(found)
            for name, found in numbers.items()
            if len(found) == len(self.reports)
        }

    @property
    def straggler(self) -> Straggler | None:
        """The rank that holds up the others; ``None`` if there is none.

        The ranks of a synchronous step wait for each other, so that all take as long as the
        slowest: their step times are about equal. What tells is how long a rank has waited for its
        own transfers. It is named if that is longer than the median rank's by more than a twentieth
        of a step.
        """
        waits = [r.stall_seconds + r.backpressure_seconds for r in self.reports]
        longest, median = max(waits), statistics.median(waits)
        step_seconds = statistics.median(r.seconds for r in self.reports)
        if longest - median <= _TELLING_SHARE * step_seconds:
            return None
        rank = waits.index(longest)
        return Straggler(rank, self.hosts[rank], longest, median)

    def to_dict(self) -> dict[str, Any]:
        """Reports, figures and straggler, plus the number of the format."""
        straggler = self.straggler
        return {
            "format": JSON_FORMAT,
            "ranks": [
                {"host": host, "report": report.to_dict()}
                for host, report in zip(self.hosts, self.reports, strict=True)
            ],
            "figures": {name: vars(figure) for name, figure in self.figures.items()},
            "straggler": vars(straggler) if straggler is not None else None,
        }

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> FigureTable:
        """The figures for people, as a ``rich`` table."""
        count = len(self.reports)
        table = FigureTable(title=f"offload: {count} rank{'s' if count != 1 else ''}")
        table.add_column()
        table.add_figures("least", "median", "most", "by rank")
        for name, figure in self.figures.items():
            if figure.high:
                shown = [_shown(name, v) for v in (figure.low, figure.median, figure.high)]
                words = name.removesuffix("_bytes").removesuffix("_seconds").replace("_", " ")
                table.add_row(words, *shown, str(figure.high_rank))
        slow = self.straggler
        table.caption = (
            "no rank waits longer for its transfers than the others"
            if slow is None
            else f"rank {slow.rank} on {slow.host} waits longest for its transfers, "
            f"{format_seconds(slow.waited_seconds)} (median {format_seconds(slow.median_seconds)})"
        )
        return table


def _shown(name: str, value: float) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.endswith("seconds"):
        return format_seconds(value)
    return f"{value:g}" if name != "overlap" else f"{value:.1%}"


def gather(report: StepReport, group: dist.ProcessGroup | None = None) -> RankReports:
    """The reports of all ranks of a group, on every one of them.

    A collective: all ranks call it, with a report each, and wait for each other. Call it between
    steps, and seldom. Without a process group there is one rank.

    Args:
        report: this rank's, of a step or of a session.
        group: ``None``: the default group.

    Example:
        >>> import offload, offload.distributed
        >>> with offload.Session() as session:
        ...     with session.step():
        ...         pass
        >>> ranks = offload.distributed.gather(session.report())
        >>> ranks.figures["steps"].median, ranks.straggler
        (1, None)
    """
    mine = (report, socket.gethostname())
    if not (dist.is_available() and dist.is_initialized()):
        return RankReports((report,), mine[1:])
    found: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, mine, group=group)
    return RankReports(tuple(r for r, _ in found), tuple(host for _, host in found))
