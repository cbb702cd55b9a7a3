"""Two reports side by side: what changed from one run to another, per step."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from offload.report.tables import FigureTable, text_of
from offload.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    from offload.report.step import StepReport

JSON_FORMAT = 1


@dataclass(frozen=True)
class Difference:
    """One figure of both reports.

    Attributes:
        name: as ``StepReport.scalars`` calls it.
        value: of the report that ``compare`` was called on.
        other: of the one it was given.
    """

    name: str
    value: float
    other: float

    @property
    def change(self) -> float:
        """How much larger it is."""
        return self.value - self.other

    @property
    def ratio(self) -> float | None:
        """How many times as large; ``None`` where the other is 0."""
        return self.value / self.other if self.other else None


@dataclass(frozen=True)
class Comparison:
    """The figures that either report has, per step.

    Example:
        >>> from dataclasses import replace
        >>> from offload import StepReport
        >>> before = replace(StepReport.of([]), steps=1, seconds=2.0)
        >>> after = replace(before, seconds=1.5)
        >>> (after - before)["seconds"].change
        -0.5
    """

    differences: tuple[Difference, ...]

    @classmethod
    def of(cls, report: StepReport, other: StepReport) -> Comparison:
        """``report`` beside ``other``."""
        values, others = report.scalars(prefix=""), other.scalars(prefix="")
        names = dict.fromkeys([*values, *others])
        return cls(tuple(Difference(n, values.get(n, 0.0), others.get(n, 0.0)) for n in names))

    def __getitem__(self, name: str) -> Difference:
        for difference in self.differences:
            if difference.name == name:
                return difference
        raise KeyError(name)

    def changed(self) -> tuple[Difference, ...]:
        """Those that are not the same."""
        return tuple(d for d in self.differences if d.change)

    def to_dict(self) -> dict[str, Any]:
        """All figures, plus the number of the format."""
        listed = [{**asdict(d), "change": d.change, "ratio": d.ratio} for d in self.differences]
        return {"format": JSON_FORMAT, "differences": listed}

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> FigureTable:
        """What changed, as a ``rich`` table."""
        table = FigureTable(title="per step")
        if not self.changed():
            table.add_column("no figure differs")
            return table
        table.add_column()
        table.add_figures("this", "other", "change", "ratio")
        for d in self.changed():
            ratio = f"{d.ratio:.2f}" if d.ratio is not None else ""
            sign = "+" if d.change > 0 else "-"
            change = sign + _shown(d.name, abs(d.change))
            table.add_row(d.name, _shown(d.name, d.value), _shown(d.name, d.other), change, ratio)
        return table


def _shown(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return format_rate(value)
    if name.endswith("bytes") or name == "written_bytes_per_day":
        return format_bytes(value)
    if name.endswith("seconds"):
        return format_seconds(value)
    if name == "overlap":
        return f"{value:.1%}"
    return f"{value:,.4g}"
