"""``offload sweep``: the curve of memory against time, planned and measured, beside other ways."""

from __future__ import annotations

import base64
import html
import io
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from offload.cli import arguments, terminal
from offload.cli.plan import measured_target, of_a_model
from offload.cli.running import expect_installed, options_of, running
from offload.cli.targets import Target
from offload.errors import OffloadError, PlanError
from offload.measure import activation_meter
from offload.planner.plan import Plan
from offload.planning import NO_LIMIT, Measurement
from offload.profiler.figures import drawn, titled
from offload.report.tables import FigureTable
from offload.session import Session
from offload.units import MIB, format_bytes, format_seconds

__all__ = ["Point", "command", "sweep"]

JSON_FORMAT = 1
_WARM_UP = 2  # steps: the second is the first that knows in which order backward asks


@dataclass(frozen=True)
class Point:
    """One way to run the step. Seconds and bytes; ``None`` or empty: not measured.

    Attributes:
        name: ``"plan"``, or one of the other ways: ``"plain"``, ``"recompute all"``, ``"offload
            all"``.
        budget_bytes: of device memory.
        predicted_seconds, predicted_bytes: of a step, and its peak.
        measured_bytes: the peak that was seen.
        round_seconds: of one step in each round.
        beside: the other way whose peak is this plan's budget.
    """

    name: str
    budget_bytes: int
    predicted_seconds: float
    predicted_bytes: int
    measured_bytes: int | None = None
    round_seconds: tuple[float, ...] = ()
    beside: str = ""

    @property
    def measured_seconds(self) -> float | None:
        """The median of the rounds."""
        return statistics.median(self.round_seconds) if self.round_seconds else None

    @property
    def seconds(self) -> float:
        """Measured, else predicted."""
        measured = self.measured_seconds
        return self.predicted_seconds if measured is None else measured

    @property
    def nbytes(self) -> int:
        """Measured, else predicted."""
        return self.predicted_bytes if self.measured_bytes is None else self.measured_bytes

    def ratio_to(self, other: Point) -> float:
        """Of times: the median of the rounds' ratios, as what slows the machine down for a while
        slows both.
        """
        if not (self.round_seconds and other.round_seconds):
            return self.seconds / other.seconds
        rounds = zip(self.round_seconds, other.round_seconds, strict=True)
        return statistics.median(mine / its for mine, its in rounds)


def other_ways(found: Measurement) -> list[tuple[str, Plan]]:
    """What plans are compared with: one action for every segment."""
    named = {"plain": "keep", "recompute all": "recompute", "offload all": found.slow}
    return [(name, found.uniform(action)) for name, action in named.items()]


def budgets_between(found: Measurement, points: int) -> list[float]:
    """From a tenth to nine tenths of what lies between the floor and all that is saved."""
    low, high = found.floor_bytes, found.plain_bytes
    return [low + (0.1 + 0.8 * i / max(1, points - 1)) * (high - low) for i in range(points)]


def sweep(
    target: Target,
    found: Measurement,
    options: dict[str, Any],
    points: int,
    steps: int,
    advance: Callable[[int], None] = lambda total: None,
) -> list[Point]:
    """Each way's point. In each of ``steps`` rounds every way runs a step that is timed; 0: none.

    After the other ways come plans for their peaks, where there are any, and for ``points`` more.
    ``advance`` is told of each run, and how many there are.
    """
    others = other_ways(found)
    plans = [plan for _, plan in others]
    done = [point_of(name, plan) for name, plan in others]
    total = max(1, steps) * (2 * len(done) - 1 + points)

    def run(number: int) -> None:
        if steps:
            done[number] = measured(target, done[number], plans[number], options)
        advance(total)

    for number in range(len(done)):
        run(number)
    beside = [(p.nbytes, p.name) for p in done if p.name != "plain"]
    for budget, name in [*beside, *((n, "") for n in budgets_between(found, points))]:
        try:
            plan = found.plan(budget)
        except PlanError:  # below the floor; or host memory or the disk do not allow it
            total -= max(1, steps)
            continue
        plans.append(plan)
        done.append(replace(point_of("plan", plan), beside=name))
        run(len(done) - 1)
    for _ in range(steps - 1):
        for number in range(len(done)):
            run(number)
    return done


def point_of(name: str, plan: Plan) -> Point:
    """What is predicted of a plan."""
    return Point(name, int(plan.budgets.device_bytes), plan.seconds, plan.peak_bytes)


def measured(target: Target, point: Point, plan: Plan, options: dict[str, Any]) -> Point:
    """The point with one more round: a step under ``plan`` after two to warm up, and in the first
    round the most memory of any.
    """
    assert target.model is not None
    budget = int(plan.budgets.device_bytes)
    limited: dict[str, Any] = {} if budget >= NO_LIMIT else {"device_budget": budget}
    seconds, peak_bytes = 0.0, 0
    with (
        Session(**options, **limited) as session,
        session.apply(target.model, plan),
    ):
        on_cpu = session.config.device.type == "cpu"
        for number in range(_WARM_UP + 1):
            if not on_cpu:
                torch.accelerator.synchronize()
                torch.accelerator.reset_peak_memory_stats()
            started = time.perf_counter()
            with session.step():
                target.step()
            if not on_cpu:
                torch.accelerator.synchronize()
            seconds = time.perf_counter() - started
            if not on_cpu and number:
                peak_bytes = max(peak_bytes, torch.accelerator.max_memory_allocated())
        if on_cpu and point.measured_bytes is None:
            # The report sees nothing small, the meter nothing that is recomputed.
            meter = activation_meter(target.model, session)
            with session.step() as step, meter:  # not timed: the meter slows it down
                target.step()
            peak_bytes = max(meter.peak_bytes, step.report.peak_live_bytes)
    return replace(
        point,
        measured_bytes=max(peak_bytes, point.measured_bytes or 0),
        round_seconds=(*point.round_seconds, seconds),
    )


# -- showing it -----------------------------------------------------------------------------------


def table_of(points: Sequence[Point]) -> FigureTable:
    """The points for people."""
    table = FigureTable(title="memory and time of a step")
    table.add_column()
    table.add_figures("budget", "peak, predicted", "measured", "step, predicted", "measured")
    for p in points:
        peak = format_bytes(p.measured_bytes) if p.measured_bytes is not None else ""
        seconds = format_seconds(p.measured_seconds) if p.measured_seconds is not None else ""
        table.add_row(
            p.name,
            _budget_text(p),
            format_bytes(p.predicted_bytes),
            peak,
            format_seconds(p.predicted_seconds),
            seconds,
        )
    table.caption = "\n".join(verdicts(points))
    table.caption_justify = "left"
    return table


def _budget_text(point: Point) -> str:
    if point.name != "plan":
        return ""
    return format_bytes(point.budget_bytes) + (f" ({point.beside})" if point.beside else "")


def verdicts(points: Sequence[Point]) -> list[str]:
    """How the fastest plan that needs no more memory compares with each of the other ways."""
    found = []
    for other in (p for p in points if p.name not in ("plan", "plain")):
        plans = [p for p in points if p.name == "plan" and p.nbytes <= other.nbytes]
        best = min(plans, key=lambda p: p.ratio_to(other), default=None)
        if best is None:
            found.append(f"{other.name}: no plan needs as little ({format_bytes(other.nbytes)})")
            continue
        found.append(
            f"{other.name}: a plan takes {best.ratio_to(other) - 1:+.1%} of its time with "
            f"{best.nbytes / other.nbytes - 1:+.1%} of its memory"
        )
    return found


def picture(points: Sequence[Point], title: str, kind: str) -> bytes:
    """The curve as ``"png"`` or ``"svg"``.

    Raises:
        OffloadError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as e:
        raise OffloadError('a picture needs matplotlib: pip install "offload[plot]"') from e
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    planned = sorted((p for p in points if p.name == "plan"), key=lambda p: p.budget_bytes)
    axes.plot(
        [p.predicted_bytes / MIB for p in planned], [p.predicted_seconds for p in planned],
        "o--", color="tab:blue", alpha=0.6, label="plan, predicted",
    )  # fmt: skip
    seen = [(_mib(p), p.measured_seconds) for p in planned if p.measured_seconds is not None]
    if seen:
        axes.plot(
            [mib for mib, _ in seen], [seconds for _, seconds in seen],
            "o-", color="tab:blue", label="plan, measured",
        )  # fmt: skip
    for p, marker in zip((p for p in points if p.name != "plan"), "s^D", strict=False):
        axes.plot([_mib(p)], [p.seconds], marker, label=p.name, markersize=8)
    axes.set_title(titled(title))
    axes.set(xlabel="peak memory of a step, MiB", ylabel="step, s")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    return drawn(figure, kind)


def _mib(point: Point) -> float:
    return point.nbytes / MIB


def page(points: Sequence[Point], title: str) -> str:
    """The curve and its figures as one HTML file that needs no other."""
    image = base64.b64encode(picture(points, title, "svg")).decode()
    out = io.StringIO()
    console = Console(file=out, record=True, width=110)
    console.print(table_of(points))
    figures = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    return (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f'<body style="font-family:sans-serif"><h1>{html.escape(title)}</h1>'
        f'<img alt="memory and time of a step" src="data:image/svg+xml;base64,{image}">{figures}'
    )


@click.command(name="sweep", short_help="Memory against time: plans, plain, recompute, offload.")
@click.option(
    "--points",
    type=click.IntRange(1, 1000),
    metavar="NUMBER",
    default=5,
    show_default=True,
    help="Budgets.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    metavar="NUMBER",
    default=2,
    show_default=True,
    help="Rounds: each way runs one step, after two to warm up; 0: predictions only.",
)
@click.option(
    "--png", type=arguments.OUTPUT_FILE, metavar="FILE", help="Draw the curve (needs matplotlib)."
)
@click.option(
    "--html",
    "page_path",
    type=arguments.OUTPUT_FILE,
    metavar="FILE",
    help="One HTML file of it (needs matplotlib).",
)
@of_a_model
@arguments.json_format
@arguments.quiet
def command(
    points: int,
    steps: int,
    segments: tuple[str, ...],
    png: str | None,
    page_path: str | None,
    as_json: bool,
    quiet: bool,
    **given: Any,
) -> None:
    """Measure TARGET, plan for several budgets, run each plan, and show memory against time.

    Beside the plans: everything kept, every segment recomputed, every segment offloaded, all by the
    same runtime. TARGET is as for the command plan. Exit status: 0; 1 if no plan fits; 2 for wrong
    usage; 3 if the target fails.
    """
    for path, option in ((png, "--png"), (page_path, "--html")):
        if path is not None:
            expect_installed("matplotlib", option, "plot")
    options = options_of(given)
    with running(given) as target:
        found = measured_target(
            target, options, device_budget=None, segments=segments, quiet=quiet or as_json
        )
        columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with terminal.progress(*columns, quiet=quiet or as_json) as progress:
            bar = progress.add_task("runs", total=None)

            def advance(total: int) -> None:
                progress.update(bar, advance=1, total=total)

            done = sweep(target, found, options, points, steps, advance)
    title = f"{target.name}: memory and time of a step"
    if png is not None:
        terminal.save(png, picture(done, title, "png"))
    if page_path is not None:
        terminal.save(page_path, page(done, title))
    if as_json:
        points_told = [{**asdict(p), "measured_seconds": p.measured_seconds} for p in done]
        terminal.print_json({"format": JSON_FORMAT, "target": target.name, "points": points_told})
    else:
        terminal.results().print(table_of(done))
