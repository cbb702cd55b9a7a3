"""``offload profile TARGET``: runs a step without and with offloading, and shows what happened."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from offload.cli import arguments, terminal
from offload.cli.running import expect_installed, options_of, running
from offload.cli.targets import Target
from offload.profiler.result import Profile
from offload.profiler.run import profile
from offload.report.tables import Prose

__all__ = ["command"]

OUT = "offload-profile"


@click.command(
    "profile", short_help="Measure what offloading costs a step, and what waits for what."
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="NUMBER",
    default=8,
    show_default=True,
    help="Pairs of steps, one plain and one offloaded.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    default=2,
    show_default=True,
    help="Pairs that are run before, and left out.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    metavar="DIR",
    default=OUT,
    show_default=True,
    help="Directory for the files; it is made if need be.",
)
@click.option("--png", is_flag=True, help="Write a picture as well (needs matplotlib).")
@arguments.of_a_run
@arguments.json_format
@arguments.quiet
def command(
    steps: int, warmup: int, out: str, png: bool, as_json: bool, quiet: bool, **given: Any
) -> None:
    """See what offloading costs a step, how much of it is hidden, and what waits for what.

    TARGET is module:function or script.py:function, which returns a step (a function that runs one
    forward and backward) or a pair (model, step); or the name of a workload, such as demo-quick.

    Writes profile.html (a page to look at), trace.json (for https://ui.perfetto.dev or
    chrome://tracing) and profile.json. Exit status: 0 if it was profiled; 2 for wrong usage, which
    a step with nothing to measure is too; 3 if the target failed.
    """
    options = options_of(given)
    into = _output(out)
    if png:
        expect_installed("matplotlib", "--png", "plot")
    with running(given) as target:
        measured = _measure(target, steps, warmup, options, quiet=quiet or as_json)
    try:
        files = measured.save(into, png=png)
    except OSError as error:
        raise terminal.unwritten(out, error) from None
    console = terminal.results(wrapped=not quiet)
    if as_json:
        terminal.print_json(measured.to_dict())
    elif quiet:
        console.print(Prose(f"{measured.verdict}."))
    else:
        console.print(measured.renderable())
        console.print(Prose(f"Written: {', '.join(os.path.join(out, f.name) for f in files)}"))


def _output(out: str) -> Path:
    """Where the files go, checked before minutes are spent on what could not be written."""
    into = Path(out).absolute()
    nearest = next(p for p in (into, *into.parents) if os.path.exists(p))
    if not out or not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise click.UsageError(f"nothing can be written to {out!r}: choose another --out")
    return into


def _measure(
    target: Target, steps: int, warmup: int, options: dict[str, Any], *, quiet: bool
) -> Profile:
    columns = (TextColumn("{task.description:32}", markup=False), BarColumn(), TimeElapsedColumn())
    with terminal.progress(*columns, quiet=quiet) as progress:
        bar = progress.add_task(target.name, total=steps + warmup + 3)
        done = -1

        def tell(doing: str) -> None:
            nonlocal done
            done += 1  # what was told before this
            progress.update(bar, description=doing, completed=done)

        return profile(
            target.step, model=target.model, steps=steps, warmup=warmup, name=target.name,
            progress=tell, **options,
        )  # fmt: skip
