"""``offload plan``: measures a training step and shows the plan for a memory budget."""

from __future__ import annotations

from typing import Any

import click
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from offload.cli import arguments, terminal
from offload.cli.arguments import Number
from offload.cli.running import expect_installed, options_of, running
from offload.cli.targets import Target, TargetError
from offload.planner.applied import Planned
from offload.planning import Measurement, measure_model, plan_from

__all__ = ["command", "measured_target", "of_a_model"]

JSON_FORMAT = 1


def of_a_model(command: Any) -> Any:
    """The arguments of a command that plans for a model."""
    segments = click.option(
        "--segment",
        "segments",
        multiple=True,
        metavar="NAME",
        help="Module to plan for [the model's repeated blocks]. May be repeated.",
    )
    return segments(arguments.of_a_run(command))


def measured_target(
    target: Target,
    options: dict[str, Any],
    *,
    device_budget: str | None,
    segments: tuple[str, ...],
    quiet: bool,
) -> Measurement:
    """Run the target's step until its plan has settled, and show that.

    Raises:
        TargetError: the target has no model.
    """
    if target.model is None:
        raise TargetError(
            f"{target.name!r} gives a step only, and a plan needs the model as well: return a "
            "pair (model, step)"
        )
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with terminal.progress(*columns, quiet=quiet) as progress:
        bar = progress.add_task("measuring", total=None)
        count = 0

        def told(planned: Planned) -> None:
            nonlocal count
            count += 1
            what = "measuring" if planned.plan is None else "trying the plan"
            progress.update(bar, description=f"{what}, {count} steps")

        return measure_model(
            target.model, target.step, device_budget=device_budget, segments=segments or None,
            after_step=told, **options,
        )  # fmt: skip


@click.command(name="plan", short_help="Plan what becomes of activations under a memory budget.")
@click.option(
    "--device-budget",
    type=arguments.SIZE_OR_AUTO,
    metavar="SIZE",
    help="Most bytes of device memory, or auto.",
)
@click.option(
    "--max-overhead",
    type=Number(min=0),
    metavar="SHARE",
    help="Most time over a plain step's, 0.1 for 10 %.",
)
@click.option(
    "--solver",
    type=click.Choice(["search", "exact"]),
    default="search",
    show_default=True,
    help="How the plan is found; exact needs scipy.",
)
@click.option(
    "--save",
    type=arguments.OUTPUT_FILE,
    metavar="FILE",
    help="Write the plan as JSON to a file.",
)
@of_a_model
@arguments.json_format
@arguments.quiet
def command(
    device_budget: str | None,
    max_overhead: float | None,
    segments: tuple[str, ...],
    solver: str,
    save: str | None,
    as_json: bool,
    quiet: bool,
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
    if solver == "exact":
        expect_installed("scipy", "--solver exact", "planner")
    options = options_of(given)
    with running(given) as target:
        found = measured_target(
            target, options, device_budget=device_budget, segments=segments,
            quiet=quiet or as_json,
        )  # fmt: skip
        made = plan_from(found, device_budget is not None, max_overhead, solver)
    if save is not None:
        terminal.save(save, made.to_json() + "\n")
    if as_json:
        terminal.print_json({"format": JSON_FORMAT, "target": target.name, "plan": made.to_dict()})
    else:
        terminal.results().print(made.table())
