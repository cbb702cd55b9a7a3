"""``offload profile TARGET``: runs a step without and with offloading, and shows what happened."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from offload.commands import kept_out, loaded, told
from offload.failure import Failure
from offload.measure import session_options
from offload.profiler.result import Profile
from offload.profiler.run import profile
from offload.targets import Target

__all__ = ["command"]

OUT = "offload-profile"


@click.command("profile")
@click.argument("target")
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Pairs of steps, one plain and one offloaded.",
)
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Pairs that are run before, and left out.",
)
@click.option(
    "--option",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="Option of the session, e.g. min_offload_bytes=256KiB. May be repeated.",
)
@click.option(
    "--disk-dir",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Directory of the scratch file [$OFFLOAD_DIR, else the temporary directory].",
)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch [its default].")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of a workload's model and data.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False),
    default=OUT,
    show_default=True,
    help="Directory for the files; it is made if need be.",
)
@click.option("--png", is_flag=True, help="Write a picture as well (needs matplotlib).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def command(
    target: str,
    steps: int,
    warmup: int,
    options: tuple[str, ...],
    disk_dir: str | None,
    threads: int | None,
    seed: int,
    out: str,
    png: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """See what offloading costs a step, how much of it is hidden, and what waits for what.

    TARGET is module:function or script.py:function, which returns a step (a function that runs one
    forward and backward) or a pair (model, step); or the name of a workload, such as demo-quick.

    Writes profile.html (a page to look at), trace.json (for https://ui.perfetto.dev or
    chrome://tracing) and profile.json. Exit status: 0 if it was profiled, 2 for wrong usage, 3 if
    the target failed or there was nothing to measure.
    """
    try:
        given = session_options(options, disk_dir=disk_dir)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    if threads is not None:
        torch.set_num_threads(threads)
    _check_output(Path(out), png)
    console = Console(quiet=quiet or as_json, highlight=False)
    with kept_out(as_json):
        found = loaded(target, seed)
        measured = _measure(found, steps, warmup, given, console)
    try:
        files = measured.save(out, png=png)
    except (ModuleNotFoundError, OSError) as error:
        raise Failure(str(error)) from None
    if as_json:
        click.echo(measured.to_json())
    elif quiet:
        click.echo(f"{measured.verdict}.")
    else:
        console.print(measured.renderable())
        console.print(
            f"Written: {', '.join(str(f) for f in files)}",
            soft_wrap=True,
            markup=False,
            emoji=False,
        )


def _check_output(out: Path, png: bool) -> None:
    """Before minutes are spent on what could not be written."""
    nearest = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise click.UsageError(f"nothing can be written to {str(out)!r}: choose another --out")
    if png and importlib.util.find_spec("matplotlib") is None:
        raise click.UsageError("--png needs matplotlib: pip install 'offload[plot]'")


def _measure(
    target: Target, steps: int, warmup: int, options: dict[str, Any], console: Console
) -> Profile:
    columns = (TextColumn("{task.description:32}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task(target.name, total=steps + warmup + 3)
        done = -1

        def tell(doing: str) -> None:
            nonlocal done
            done += 1  # what was told before this
            progress.update(bar, description=doing, completed=done)

        with told(target):
            return profile(
                target.step, model=target.model, steps=steps, warmup=warmup, name=target.name,
                progress=tell, **options,
            )  # fmt: skip
