"""Tables as text: readable on a terminal of any width, with no figure cut or broken."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TextIO

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

__all__ = ["UNWRAPPED_COLUMNS", "FigureTable", "Prose", "text_of", "width_of"]

UNWRAPPED_COLUMNS = 1000  # what is no terminal is not wrapped for one
_WIDEST_CELL = 72  # of text that may be wrapped
_GLUE = "\ue000"  # a space at which no line breaks; rich breaks lines at U+00A0 too
_BEFORE_UNIT = re.compile(
    r"(?<=\d) (?=(?:bytes?|[KMGTPE]i?B(?:/s)?|[num]?s|days?|years|TFLOP/s)\b)|\u00a0"
)


def width_of(stream: TextIO | None, otherwise: int = UNWRAPPED_COLUMNS) -> int:
    """The columns of a stream: ``$COLUMNS``, else those of its terminal, if it is one."""
    given = os.environ.get("COLUMNS", "")
    if given.isascii() and given.isdigit() and int(given) > 0:
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns if stream is not None else otherwise
    except (OSError, ValueError):  # no terminal, no descriptor, or closed
        return otherwise


def text_of(*parts: RenderableType, width: int | None = None) -> str:
    """What ``rich`` would print, without colours.

    Args:
        parts: what to print, one below the other.
        width: in characters; ``None``: that of standard output, or where it is no terminal, 100.

    Example:
        >>> text_of("[bold]4[/] steps")
        '4 steps'
    """
    out = io.StringIO()
    console = Console(file=out, width=width_of(sys.stdout, 100) if width is None else width)
    for part in parts:
        console.print(part)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).rstrip()


class Prose:
    """Text that is wrapped between words only, and never within a figure.

    Example:
        >>> print(text_of(Prose("waited 12.5 ms in all"), width=12))
        waited
        12.5 ms in
        all
    """

    def __init__(self, text: str | Text, style: str = "") -> None:
        self._text = _glued(text)
        self._text.stylize(style)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return _loosened(console, options, self._text)


class _Look(NamedTuple):
    """How columns stand side by side."""

    box: box.Box
    padding: tuple[int, int, int, int]
    has_edge: bool

    def between(self, columns: int) -> int:
        """Characters that are not the columns' own."""
        gap = self.padding[1] + self.padding[3] + 1
        return gap * columns + 1 if self.has_edge else gap * (columns - 1)


_LOOKS = (
    _Look(box.HEAVY_HEAD, (0, 1, 0, 1), has_edge=True),
    _Look(box.SIMPLE_HEAD, (0, 1, 0, 0), has_edge=False),
    _Look(box.SIMPLE_HEAD, (0, 0, 0, 0), has_edge=False),
)


class FigureTable(Table):
    """A ``rich`` table that cuts nothing off and breaks no figure.

    Columns that do not fit side by side move closer together; if that does not do, each row becomes
    a list of its cells with their headings. A number stays with its unit; other words are held
    together by no-break spaces (U+00A0). All text, titles too, is plain and no markup; give a
    ``Text`` for styles.

    Example:
        >>> table = FigureTable(title="tried")
        >>> table.add_figures("window", "time to plain")
        >>> table.add_row("32 MiB", "1.04")
        >>> print(text_of(table, width=15))
             tried
                time to
        window    plain
        ───────────────
        32 MiB     1.04
        >>> print(text_of(table, width=11))
        tried
        window
          32 MiB;
          time to
          plain
          1.04
    """

    @classmethod
    def of_facts(cls, title: str, facts: Mapping[str, str]) -> FigureTable:
        """One fact a row, its name before it; no headings."""
        table = cls(title=title, show_header=False)
        table.add_column(style="bold")
        table.add_column()
        for name, value in facts.items():
            table.add_row(name, value)
        return table

    def add_figures(self, *headings: str) -> None:
        """Columns of figures, which end below each other."""
        for heading in headings:
            self.add_column(heading, justify="right")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return _loosened(console, options, self._laid_out(options.max_width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, options.max_width)  # it fits into whatever there is

    def _laid_out(self, width: int) -> RenderableType:
        columns = [[_glued(cell) for cell in column.cells] for column in self.columns]
        headings = [_glued(column.header) for column in self.columns]
        shown = headings if self.show_header else [Text()] * len(headings)
        ranges = [_range([h, *cells]) for h, cells in zip(shown, columns, strict=True)]
        for look in _LOOKS:
            between = look.between(len(columns))
            widths = _fitted(ranges, width - between)
            if widths is not None:
                drawn = self._drawn(look, headings, columns, widths)
                return self._with_titles(drawn, sum(widths) + between, width)
        return self._with_titles(Group(*self._listed(shown, columns, width)), 0, width)

    def _drawn(
        self, look: _Look, headings: list[Text], columns: list[list[Text]], widths: list[int]
    ) -> Table:
        drawn = Table(
            box=look.box, padding=look.padding, show_header=self.show_header,
            show_edge=look.has_edge, pad_edge=look.has_edge,
        )  # fmt: skip
        drawn.columns = [
            replace(column, header=heading, width=width, no_wrap=False, _cells=list(cells))
            for column, heading, width, cells in zip(
                self.columns, headings, widths, columns, strict=True
            )
        ]
        drawn.rows = self.rows
        return drawn

    def _with_titles(self, drawn: RenderableType, drawn_width: int, width: int) -> Group:
        parts = [drawn]
        if self.title:
            title = _glued(self.title)
            title.stylize("table.title")
            title.pad_left(max(0, min(drawn_width, width) - title.cell_len) // 2)
            parts.insert(0, title)
        if self.caption:
            caption = _glued(self.caption)
            caption.stylize("table.caption")
            parts.append(caption)
        return Group(*parts)

    def _listed(
        self, headings: list[Text], columns: list[list[Text]], width: int
    ) -> Iterable[Text]:
        """The rows, each as text with a hanging indent."""
        for row, cells in zip(self.rows, zip(*columns, strict=True), strict=True):
            told = [
                _pair(heading, cell, width - 2)
                for heading, cell in zip(headings, cells, strict=True)
                if cell.plain.strip()
            ]
            text = Text("; " if headings[0] else ": ").join(
                [*told[:1], *([Text("; ").join(told[1:])] if told[1:] else [])]
            )
            text.stylize(row.style or "")
            lines = text.wrap(_MEASURING, max(1, width - 2), overflow="fold")
            yield Text("\n  ").join(line for line in lines)


def _pair(heading: Text, cell: Text, width: int) -> Text:
    """A cell with its heading, on one line where there is room for that."""
    if not heading:
        return cell
    together = Text(f"{heading.plain.split()[-1]} {cell.plain.split()[0]};")
    return Text.assemble(heading, _GLUE if together.cell_len <= width else " ", cell)


_MEASURING = Console(file=io.StringIO(), width=UNWRAPPED_COLUMNS)


def _glued(text: object) -> Text:
    """As plain text, with glue where no line may break."""
    made = text.copy() if isinstance(text, Text) else Text(str(text))
    made.plain = _BEFORE_UNIT.sub(_GLUE, made.plain)
    return made


def _loosened(console: Console, options: ConsoleOptions, part: RenderableType) -> RenderResult:
    for segment in console.render(part, options):
        yield Segment(segment.text.replace(_GLUE, " "), segment.style, segment.control)


def _range(cells: Sequence[Text]) -> tuple[int, int]:
    """The least and the best width of a column."""
    least = max((Text(word).cell_len for c in cells for word in c.plain.split()), default=0)
    most = max((Text(line).cell_len for c in cells for line in c.plain.splitlines()), default=0)
    return least, max(least, min(most, _WIDEST_CELL))


def _fitted(ranges: Sequence[tuple[int, int]], width: int) -> list[int] | None:
    """Widths of columns that come to at most ``width``; the widest give way first.

    Example:
        >>> _fitted([(4, 10), (6, 6)], 14), _fitted([(4, 10), (6, 6)], 9)
        ([8, 6], None)
    """
    widths = [most for _, most in ranges]
    while sum(widths) > width:
        loose = [i for i, (least, _) in enumerate(ranges) if widths[i] > least]
        if not loose:
            return None
        widths[max(loose, key=widths.__getitem__)] -= 1
    return widths
