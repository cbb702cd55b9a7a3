"""``offload plan``: measures a training step and shows the plan for a memory budget."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from offload.commands import expect_writable, guarded, kept_out, loaded
from offload.errors import OffloadError, PlanError
from offload.measure import session_options
from offload.planner.applied import Planned
from offload.planning import Measurement, measure_model, plan_from
from offload.targets import Target

__all__ = ["Failed", "command", "measured_target", "opened", "target_options"]

_Command = Callable[..., None]


class Failed(click.ClickException):
    """What was asked for cannot be done."""

    exit_code = 1


def target_options(function: _Command) -> _Command:
    """The target and the options of the session, for commands that run one."""
    decorators = [
        click.argument("target"),
        click.option("--disk-dir", metavar="DIR", help="Where the scratch file lies."),
        click.option("--host-budget", metavar="SIZE", help="Most bytes of host memory."),
        click.option("--disk-budget", metavar="SIZE", help="Most bytes on the disk."),
        click.option("--device", metavar="NAME", help="Whose activations are planned for."),
        click.option(
            "--segment", "segments", multiple=True, metavar="NAME",
            help="Module to plan for; may be repeated. Default: the model's repeated blocks.",
        ),
        click.option(
            "--option", "-o", "options", multiple=True, metavar="NAME=VALUE",
            help="Any other option of the session; may be repeated.",
        ),
        click.option("--seed", default=0, show_default=True, help="Of a workload."),
        click.option("--threads", type=click.IntRange(1), help="Threads of torch."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object, no tables."),
        click.option("--quiet", "-q", is_flag=True, help="Results only, no progress."),
    ]  # fmt: skip
    for decorator in reversed(decorators):
        function = decorator(function)
    return function


def opened(target: str, given: dict[str, Any]) -> tuple[Target, dict[str, Any]]:
    """The target, and the options of the session; ``given`` are the command's own.

    Raises:
        click.UsageError: one of them cannot work.
    """
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    names = ("disk_dir", "host_budget", "disk_budget", "device")
    try:
        options = session_options(given["options"], **{name: given[name] for name in names})
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    with kept_out(given["as_json"]):
        found = loaded(target, given["seed"])
    if found.model is None:
        raise click.UsageError(
            f"{target!r} gives a step only, and a plan needs the model as well: return a pair "
            "(model, step)"
        )
    return guarded(found, as_json=given["as_json"]), options


def measured_target(
    target: Target,
    options: dict[str, Any],
    console: Console,
    *,
    device_budget: str | None,
    segments: tuple[str, ...],
    solver: str,
) -> Measurement:
    """Run the target's step until its plan has settled, and show that."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    assert target.model is not None
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("measuring", total=None)
        count = 0

        def told(planned: Planned) -> None:
            nonlocal count
            count += 1
            what = "measuring" if planned.plan is None else "trying the plan"
            progress.update(bar, description=f"{what}, {count} steps")

        return measure_model(
            target.model, target.step, device_budget=device_budget, segments=segments or None,
            solver=solver, after_step=told, **options,
        )  # fmt: skip


@click.command(name="plan", short_help="Plan what becomes of activations under a memory budget.")
@target_options
@click.option("--device-budget", metavar="SIZE", help="Most bytes of device memory.")
@click.option("--max-overhead", type=click.FloatRange(0), help="Most time over plain: 0.1 = 10 %.")
@click.option(
    "--solver", type=click.Choice(["search", "exact"]), default="search", show_default=True,
    help="How the plan is found; exact needs scipy.",
)  # fmt: skip
@click.option("--save", type=click.Path(dir_okay=False), help="Write the plan as JSON to a file.")
def command(
    target: str,
    device_budget: str | None,
    max_overhead: float | None,
    solver: str,
    save: str | None,
    **given: Any,
) -> None:
    """Measure a few steps of TARGET and plan what becomes of the activations of each part.

    TARGET is module:function or script.py:function, which returns (model, step), or the name of a
    workload. Without --device-budget the least memory within --max-overhead is found. Exit status:
    0 with a plan, 1 if none fits (the message says what is needed at least), 2 for wrong usage,
    3 if the target fails.
    """
    if device_budget is None and max_overhead is None:
        raise click.UsageError("give --device-budget, or --max-overhead, or both")
    if save is not None:
        expect_writable(Path(save), "--save")
    run, options = opened(target, given)
    console = Console(quiet=given["quiet"] or given["as_json"], stderr=True)
    try:
        found = measured_target(
            run, options, console,
            device_budget=device_budget, segments=given["segments"], solver=solver,
        )  # fmt: skip
        made = plan_from(found, device_budget is not None, max_overhead, solver)
    except PlanError as error:
        raise Failed(str(error)) from None
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    except (OffloadError, OSError) as error:
        raise Failed(str(error)) from None
    if save is not None:
        try:
            Path(save).write_text(made.to_json() + "\n")
        except OSError as error:
            raise click.UsageError(f"{save} cannot be written: {error.strerror}") from None
    if given["as_json"]:
        click.echo(json.dumps({"format": 1, "target": run.name, "plan": made.to_dict()}))
    else:
        Console(highlight=False, width=None if sys.stdout.isatty() else 110).print(made.table())
