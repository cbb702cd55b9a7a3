"""Drift: how far recomputed values are from those of the forward, module by module.

Values only; ``verify`` finds them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from offload.report.tables import FigureTable, text_of

__all__ = ["ModuleDrift", "RecomputeReport", "difference", "report_of"]

JSON_FORMAT = 1


@dataclass(frozen=True)
class ModuleDrift:
    """What recomputations made of the operations of one module.

    Attributes:
        module: the class of the outermost module and the name within it; for what runs in no module
            the name of the function.
        results: results of operations that were compared, those of modules inside it not counted.
        different: how many of them were not equal.
        max_abs: largest difference of an element; infinite where one of the two is not a number or
            the shapes differ.
        max_rel: the same, relative to the largest magnitude in that result of the forward.
        operation: the first of its operations whose result differed although its inputs were
            equal: there the module itself does not repeat what it did. ``None``: there is none, and
            differences come from inputs.
    """

    module: str
    results: int
    different: int
    max_abs: float
    max_rel: float
    operation: str | None


@dataclass(frozen=True)
class RecomputeReport:
    """How far recomputed values were from those of the forward.

    Attributes:
        regions: checkpointed regions whose forward was watched.
        recomputations: how often one of them was computed again.
        modules: in the order in which the forward reached them.
        first: the name of the first module in that order that is not deterministic.

    Example:
        >>> import offload
        >>> x = torch.ones(3, requires_grad=True)
        >>> with offload.Session(verify_recompute=True) as session, session.step():
        ...     offload.checkpoint(torch.nn.Tanh(), x).sum().backward()
        >>> report = session.recompute_report()
        >>> report.recomputations, report.drifted, [m.module for m in report.modules]
        (1, False, ['Tanh'])
    """

    regions: int
    recomputations: int
    modules: tuple[ModuleDrift, ...]
    first: str | None

    @property
    def drifted(self) -> bool:
        """Whether any value differs."""
        return any(m.different for m in self.modules)

    def to_dict(self) -> dict[str, Any]:
        """Every field, plus the number of the format. Differences may be infinite."""
        return {"format": JSON_FORMAT, **asdict(self), "modules": [asdict(m) for m in self.modules]}

    def to_json(self) -> str:
        """``to_dict`` as JSON; what is infinite is ``Infinity``, as Python reads it."""
        return json.dumps(self.to_dict())

    def __str__(self) -> str:
        return text_of(self.table())

    def table(self) -> FigureTable:
        """The modules that differ, or one line that says that none does, as a ``rich`` table."""
        compared = sum(m.results for m in self.modules)
        table = FigureTable(
            title=f"recomputed: {self.recomputations} times, {self.regions} regions",
            caption=f"{compared} results of {len(self.modules)} modules compared",
        )
        if not self.drifted:
            table.add_column(
                "no module differs" if compared else "nothing was compared", min_width=40
            )
            return table
        table.add_column("module")
        table.add_figures("differ", "max abs", "max rel")
        table.add_column("differs first in")
        for m in self.modules:
            if m.different:
                where = "its inputs" if m.operation is None else m.operation
                numbers = (f"{m.different} of {m.results}", f"{m.max_abs:.3g}", f"{m.max_rel:.3g}")
                table.add_row(m.module, *numbers, where, style=_style(m, self.first))
        return table


def _style(drift: ModuleDrift, first: str | None) -> str:
    return "bold yellow" if drift.module == first else "yellow"


def report_of(
    regions: int, recomputations: int, modules: Iterable[tuple[tuple[int, int] | None, ModuleDrift]]
) -> RecomputeReport:
    """The report, from modules in their order and where in the forward each went astray."""
    listed = list(modules)
    astray = [(where, drift.module) for where, drift in listed if where is not None]
    return RecomputeReport(
        regions,
        recomputations,
        tuple(drift for _, drift in listed),
        min(astray)[1] if astray else None,
    )


def difference(expected: Tensor, got: Tensor) -> tuple[float, float]:
    """The largest difference of an element, absolute and relative to the largest in ``expected``.

    Not-a-numbers are equal to each other; a difference to one, or in shape, is infinite.

    Example:
        >>> import torch
        >>> difference(torch.tensor([1.0, -4.0]), torch.tensor([1.0, -3.0]))
        (1.0, 0.25)
        >>> difference(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]))
        (0.0, 0.0)
    """
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf"), float("inf")
    if expected.is_meta or torch.equal(expected, got):
        return 0.0, 0.0
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.cpu().to(wide), got.cpu().to(wide)  # not every device has doubles
    same = (a == b) | (a.isnan() & b.isnan())
    off = torch.where(same, 0.0, (a - b).abs())
    largest = float(off.nan_to_num(float("inf"), float("inf")).max())
    if largest == 0.0:
        return 0.0, 0.0
    scale = float(torch.where(a.isfinite(), a.abs(), 0.0).max())
    return largest, largest / scale if scale else float("inf")
