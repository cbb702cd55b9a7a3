"""``offload tune``: find a session's options for a training step, and write them to a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from offload.cli import arguments, terminal
from offload.cli.arguments import Number
from offload.cli.running import options_of, running
from offload.config import Config
from offload.probe import machine_profile
from offload.report.tables import FigureTable, Prose
from offload.tuner.decide import Choice
from offload.tuner.search import Trial
from offload.tuner.setting import Setting
from offload.tuner.trial import TimedSteps
from offload.tuner.tuning import Tuning, tune
from offload.units import GIB, KIB, MIB, SECONDS_PER_DAY, format_bytes, format_seconds

__all__ = ["command"]


@click.command("tune")
@click.option(
    "--max-live-bytes",
    type=arguments.SIZE,
    metavar="SIZE",
    help="Most activations alive, e.g. 200MiB.",
)
@click.option(
    "--max-overhead",
    type=Number(min=0, max=10),
    metavar="SHARE",
    help="Most time over a plain step's, 0.05 for 5 % [0.05 without --max-live-bytes].",
)
@click.option(
    "--budget-seconds",
    type=Number(min=0, min_open=True),
    metavar="SECONDS",
    default=300,
    show_default=True,
    help="No trial begins after so much time.",
)
@click.option(
    "--trials",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    default=8,
    show_default=True,
    help="Settings that are tried at most.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    default=2,
    show_default=True,
    help="Timed steps of a trial.",
)
@click.option("--remeasure", is_flag=True, help="Measure the machine again.")
@click.option(
    "--output",
    type=arguments.OUTPUT_FILE,
    metavar="FILE",
    default="offload.toml",
    show_default=True,
    help="File for the options that were found.",
)
@arguments.of_a_run
@arguments.json_format
@arguments.quiet
def command(
    max_live_bytes: str | None,
    max_overhead: float | None,
    budget_seconds: float,
    trials: int,
    repeats: int,
    remeasure: bool,
    output: str,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Find a session's options for TARGET.

    Sought are those with which it keeps to a limit of memory at the least cost of time, or the
    other way round.

    TARGET is module:function or script.py:function, which returns a step (or a model and a step),
    or the name of a workload. One plain step is recorded and replayed under hundreds of settings;
    the most promising are tried. The result is written to a file that Session.from_file reads.
    Exit status: 0 if a session is recommended; 1 if not, and nothing is written; 2 for wrong usage;
    3 if the target fails.
    """
    config = Config(**options_of(given))
    with running(given) as target, _bar(budget_seconds, quiet=quiet or as_json) as advance:
        if remeasure:
            advance("rates of this machine")
            machine_profile(config, refresh=True)
        found = tune(
            target.step, target.model, max_live_bytes=max_live_bytes, max_overhead=max_overhead,
            budget_seconds=budget_seconds, max_trials=trials, repeats=repeats, config=config,
            advance=advance,
        )  # fmt: skip
    _save(found, target.name, output)
    if as_json:
        written = output if found.decision.trial is not None else None
        terminal.print_json({"target": target.name, "file": written, **found.to_dict()})
    else:
        _report(found, output, quiet=quiet)
    sys.exit(0 if found.decision.choice is Choice.OFFLOAD else 1)


@contextmanager
def _bar(budget_seconds: float, *, quiet: bool) -> Iterator[_Advance]:
    columns = (SpinnerColumn(), TextColumn("{task.description:32}"), BarColumn())
    with terminal.progress(*columns, TimeElapsedColumn(), quiet=quiet) as progress:
        yield _Advance(progress, budget_seconds)


class _Advance:
    """Moves the bar on by the time that has gone of the budget."""

    def __init__(self, progress: Progress, budget_seconds: float) -> None:
        self._progress = progress
        self._started = time.monotonic()
        self._task = progress.add_task("", total=budget_seconds)

    def __call__(self, what: str) -> None:
        gone = time.monotonic() - self._started
        self._progress.update(self._task, completed=gone, description=what)


def _save(found: Tuning, name: str, output: str) -> None:
    if found.decision.trial is not None:
        try:
            found.save(output, title=f"Written by offload tune for {terminal.one_line(name)}.")
        except OSError as error:
            raise terminal.unwritten(output, error) from None


def _report(found: Tuning, output: str, *, quiet: bool) -> None:
    chosen = found.decision.trial
    tables, verdict = terminal.results(quiet=quiet), terminal.results(wrapped=not quiet)
    tables.print(_measured_table(found))
    if found.curve:
        tables.print(_curve_table(found))
    if chosen is None:
        advice = {
            Choice.PLAIN: "Train plain",
            Choice.CHECKPOINT: "Recompute instead",
        }.get(found.decision.choice, "No session is recommended")
        advised = Text.assemble((f"{advice}:", "bold yellow"), f" {found.decision.why}.")
        verdict.print(Prose(advised))
        return
    verdict.print(Prose(Text.assemble(("Offload:", "bold green"), f" {found.decision.why}.")))
    told = ", ".join(f"{name}={value}" for name, value in (found.options or {}).items())
    verdict.print(Prose(f"Written to {output}, for Session.from_file: {told}."))
    report = chosen.measured.report
    if report is not None and report.written_bytes:
        daily = report.written_bytes / chosen.measured.best_seconds * SECONDS_PER_DAY
        verdict.print(
            Prose(
                f"It writes {format_bytes(report.written_bytes)} a step, {daily / 1e12:.1f} TB a "
                "day: mind what the disk is rated for."
            )
        )


def _measured_table(found: Tuning) -> FigureTable:
    table = FigureTable(title="Tried")
    table.add_column()
    names = ("least", "window", "prefetch", "kept", "I/O")
    table.add_figures(*names, "time to plain (predicted)", "alive (predicted)", "waited")

    def row(name: str, m: TimedSteps, trial: Trial | None = None) -> None:
        ratio, live, waited = f"{m.ratio:.3f}", _brief(m.peak_live_bytes), ""
        if trial is not None:
            ratio += f" ({trial.predicted_ratio:.3f})"
            live += f" ({_brief(trial.predicted_live_bytes)})"
        if m.report is not None:
            waited = format_seconds(m.report.stall_seconds + m.report.backpressure_seconds)
        cells = ("",) * len(names) if trial is None else _row(trial.setting)
        chosen = trial is not None and trial is found.decision.trial
        style = "bold green" if chosen else None
        table.add_row(name, *cells, ratio, live, waited, style=style)

    row("plain", found.plain)
    if found.recomputed is not None:
        row("recomputed", found.recomputed)
    for number, trial in enumerate(found.trials, 1):
        row(str(number), trial.measured, trial)
    return table


def _curve_table(found: Tuning) -> FigureTable:
    table = FigureTable(title=f"Time and memory, as predicted of {found.settings} settings")
    table.add_figures("alive", "time to plain", "least", "window", "prefetch", "kept", "I/O")
    for setting, ratio, live_bytes in found.curve:
        table.add_row(format_bytes(live_bytes), f"{ratio:.3f}", *_row(setting))
    return table


def _row(setting: Setting) -> tuple[str, ...]:
    """The cells of a setting; the last one is not broken."""
    sizes = (
        setting.min_offload_bytes, setting.window_bytes, setting.prefetch_bytes,
        setting.keep_last_bytes,
    )  # fmt: skip
    return (
        *map(_brief, sizes),
        f"{setting.io_threads}\u00a0x\u00a0{_brief(setting.io_block_bytes)}",
    )


def _brief(nbytes: int) -> str:
    """Bytes for a narrow column.

    Example:
        >>> [_brief(n) for n in (0, 65536, 1 << 20, 3 << 19, 3 << 30)]
        ['0', '64K', '1M', '1.5M', '3G']
    """
    for unit, size in (("G", GIB), ("M", MIB), ("K", KIB)):
        if nbytes >= size:
            return f"{nbytes / size:.3g}{unit}"
    return str(nbytes)
