"""``offload tune``: find a session's options for a training step, and write them to a file."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import click
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from offload.commands import expect_writable, kept_out, loaded, told
from offload.config import Config
from offload.failure import Failure
from offload.measure import session_options
from offload.probe import machine_profile
from offload.tuner.decide import Choice
from offload.tuner.setting import Setting
from offload.tuner.trial import Measured
from offload.tuner.tuning import Tuning, tune
from offload.units import format_bytes, format_seconds, parse_bytes

__all__ = ["command"]

_DAY_SECONDS = 24 * 3600


@click.command("tune")
@click.argument("target")
@click.option("--max-live-bytes", metavar="SIZE", help="Most activations alive, e.g. 200MiB.")
@click.option(
    "--max-overhead",
    type=click.FloatRange(min=0, max=10),
    metavar="SHARE",
    help="Most time over a plain step's, 0.05 for 5 % [0.05 without --max-live-bytes].",
)
@click.option("--budget-seconds", type=click.FloatRange(min=0), default=300, show_default=True)
@click.option("--trials", type=click.IntRange(min=1), default=8, show_default=True)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Steps of a trial."
)
@click.option("--device", help="Device that trains [the accelerator, else cpu].")
@click.option("--disk-dir", type=click.Path(), help="Directory of the scratch file.")
@click.option("--engine", type=click.Choice(["native", "aio"]), help="Disk engine [native].")
@click.option(
    "--option", "options", metavar="NAME=VALUE", multiple=True, help="Another option to begin with."
)
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of a workload.")
@click.option("--remeasure", is_flag=True, help="Measure the machine again.")
@click.option(
    "--output", type=click.Path(dir_okay=False), default="offload.toml", show_default=True
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def command(
    target: str,
    max_live_bytes: str | None,
    max_overhead: float | None,
    budget_seconds: float,
    trials: int,
    repeats: int,
    device: str | None,
    disk_dir: str | None,
    engine: Literal["native", "aio"] | None,
    options: tuple[str, ...],
    seed: int,
    remeasure: bool,
    output: str,
    as_json: bool,
    quiet: bool,
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
    console = Console(quiet=quiet or as_json, highlight=False)
    try:
        given = session_options(options, device=device, disk_dir=disk_dir, engine=engine)
        config = Config(**given)
        if max_live_bytes is not None:
            parse_bytes(max_live_bytes, "--max-live-bytes")
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    expect_writable(Path(output), "--output")
    with kept_out(as_json):
        run = loaded(target, seed)
        with _bar(console, budget_seconds) as advance, told(run):
            if remeasure:
                advance("rates of this machine")
                machine_profile(config, refresh=True)
            found = tune(
                run.step, run.model, max_live_bytes=max_live_bytes, max_overhead=max_overhead,
                budget_seconds=budget_seconds, max_trials=trials, repeats=repeats, config=config,
                advance=advance,
            )  # fmt: skip
    _report(found, run.name, output, console, as_json=as_json)
    sys.exit(0 if found.decision.choice is Choice.OFFLOAD else 1)


@contextmanager
def _bar(console: Console, budget_seconds: float) -> Iterator[_Advance]:
    columns = (SpinnerColumn(), TextColumn("{task.description:32}"), BarColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
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


def _report(found: Tuning, name: str, output: str, console: Console, *, as_json: bool) -> None:
    chosen = found.decision.trial
    try:
        if chosen is not None:
            found.save(output, title=f"Written by offload tune for {name}.")
    except OSError as error:
        raise Failure(f"{output} cannot be written: {error}") from None
    if as_json:
        written = output if chosen is not None else None
        click.echo(json.dumps({"target": name, "file": written, **found.to_dict()}))
        return
    console.print(_measured_table(found))
    if found.curve:
        console.print(_curve_table(found))
    verdict = Console(highlight=False, soft_wrap=True)
    if chosen is None:
        advice = {
            Choice.PLAIN: "Train plain",
            Choice.CHECKPOINT: "Recompute instead",
        }.get(found.decision.choice, "No session is recommended")
        verdict.print(f"[bold yellow]{advice}:[/] {escape(found.decision.why)}.")
        return
    verdict.print(f"[bold green]Offload:[/] {escape(found.decision.why)}.")
    told = ", ".join(f"{name}={value}" for name, value in (found.options or {}).items())
    verdict.print(f"Written to {escape(output)}, for Session.from_file: {told}.")
    report = chosen.measured.report
    if report is not None and report.written_bytes:
        daily = report.written_bytes / chosen.measured.best_seconds * _DAY_SECONDS
        verdict.print(
            f"It writes {format_bytes(report.written_bytes)} a step, {daily / 1e12:.1f} TB a day: "
            "mind what the disk is rated for."
        )


def _measured_table(found: Tuning) -> Table:
    table = Table(title="Tried")
    names = ("least", "window", "prefetch", "kept", "I/O")
    for heading in (*names, "time to plain", "predicted", "alive", "predicted", "waited"):
        table.add_column(heading, justify="right")

    def row(cells: tuple[str, ...], m: Measured, ratio: str = "", live: str = "") -> None:
        waited = ""
        if m.report is not None:
            waited = format_seconds(m.report.stall_seconds + m.report.backpressure_seconds)
        alive = format_bytes(m.peak_live_bytes)
        table.add_row(*cells, f"{m.ratio:.3f}", ratio, alive, live, waited)

    row(("plain", "", "", "", ""), found.plain)
    if found.recomputed is not None:
        row(("recomputed", "", "", "", ""), found.recomputed)
    for trial in found.trials:
        cells = _row(trial.setting)
        if trial is found.decision.trial:
            cells = tuple(f"[bold green]{cell}[/]" for cell in cells)
        live = format_bytes(trial.predicted_live_bytes)
        row(cells, trial.measured, f"{trial.predicted_ratio:.3f}", live)
    return table


def _curve_table(found: Tuning) -> Table:
    table = Table(title=f"Time and memory, as predicted of {found.settings} settings")
    for heading in ("alive", "time to plain", "least", "window", "prefetch", "kept", "I/O"):
        table.add_column(heading, justify="right")
    for setting, ratio, live_bytes in found.curve:
        table.add_row(format_bytes(live_bytes), f"{ratio:.3f}", *_row(setting))
    return table


def _row(setting: Setting) -> tuple[str, ...]:
    sizes = (
        setting.min_offload_bytes, setting.window_bytes, setting.prefetch_bytes,
        setting.keep_last_bytes,
    )  # fmt: skip
    return (*map(_brief, sizes), f"{setting.io_threads} x {_brief(setting.io_block_bytes)}")


def _brief(nbytes: int) -> str:
    """Bytes for a narrow column.

    Example:
        >>> [_brief(n) for n in (0, 65536, 1 << 20, 3 << 19, 3 << 30)]
        ['0', '64K', '1M', '1.5M', '3G']
    """
    for unit, size in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.3g}{unit}"
    return str(nbytes)
