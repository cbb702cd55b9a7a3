"""Compares ways to hold activations by the time and memory of a training step.

Every mode runs in a fresh process, in rounds (A B C, A B C, ...), so that slow drift of the
machine meets all of them alike. Step time is forward and backward, without the optimizer. The ratio
to plain is that of the medians of one round; its median and range are over the rounds.
step_worker.py says what a process does and how it tells memory.

    python scripts/bench_step.py --workload gpt --modes plain,checkpoint,offload --rounds 5
    python scripts/bench_step.py --workload vision --option window_bytes=32MiB --json

Exit status: 0, also where a target is missed; 1 if gradients differ; 2 for wrong usage; 3 if a run
failed.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from listed import names_of
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from step_worker import MODES, Task

from offload.errors import OffloadError
from offload.measure import Spread, session_options, worker_messages
from offload.probe.facts import host_facts
from offload.system.machine import filesystem_of, total_memory_bytes
from offload.units import format_bytes
from offload.workloads import PRESETS, preset

JSON_FORMAT = 1
WORKER = Path(__file__).with_name("step_worker.py")
Results = dict[str, list[dict[str, Any]]]  # by mode, one entry per round

MAX_RATIO = {"gpt": 1.02, "long": 1.03, "vision": 1.10}
MAX_LIVE_SHARE = {"gpt": 0.15}
MAX_RSS_SHARE = {"gpt": 0.25}
MIN_GAIN_OVER_FILES = 5.0


@dataclass(frozen=True)
class Summary:
    """One mode over all rounds; sizes in bytes, times in seconds, counts per step."""

    mode: str
    step_seconds: Spread
    ratio: Spread | None  # to plain
    live_bytes: float
    rss_growth_bytes: float
    rss_over_model_bytes: float
    minor_faults: float
    written_bytes: float
    read_bytes: float
    stall_seconds: float


@dataclass(frozen=True)
class Target:
    """Something that should hold, and whether it does."""

    what: str
    measured: str
    holds: bool


def summarise(results: Results) -> list[Summary]:
    """A summary per mode, in the order they ran."""
    return [_summary(mode, runs, results.get("plain")) for mode, runs in results.items()]


def _summary(mode: str, runs: list[dict[str, Any]], plain: list[dict[str, Any]] | None) -> Summary:
    def median(get: Callable[[dict[str, Any]], float]) -> float:
        return Spread.of([get(run) for run in runs]).median

    def step_seconds(run: dict[str, Any]) -> float:
        return Spread.of(run["seconds"]).median

    ratios = [step_seconds(r) / step_seconds(p) for r, p in zip(runs, plain or [], strict=False)]
    return Summary(
        mode,
        Spread.of([s for run in runs for s in run["seconds"]]),
        Spread.of(ratios) if ratios else None,
        median(lambda run: run["peak_live_bytes"]),
        median(lambda run: Spread.of(run["rss_growth_bytes"]).median),
        median(lambda run: run["rss_over_model_bytes"]),
        median(lambda run: Spread.of(run["minor_faults"]).median),
        median(lambda run: run["per_step"].get("written_bytes", 0)),
        median(lambda run: run["per_step"].get("read_bytes", 0)),
        median(
            lambda run: (
                run["per_step"].get("stall_seconds", 0.0)
                + run["per_step"].get("backpressure_seconds", 0.0)
            )
        ),
    )


def targets(workload: str, summaries: list[Summary]) -> list[Target]:
    """What offloading should reach on ``workload``, as far as the modes for it were run."""
    by_mode = {s.mode: s for s in summaries}
    plain, ours = by_mode.get("plain"), by_mode.get("offload")
    if plain is None or ours is None or ours.ratio is None:
        return []
    found = []
    if workload in MAX_RATIO:
        limit = MAX_RATIO[workload]
        ratio = ours.ratio.median
        found.append(Target(f"step time <= {limit:.2f} plain", f"{ratio:.3f}", ratio <= limit))
    for what, limits, share in (
        ("activations", MAX_LIVE_SHARE, ours.live_bytes / plain.live_bytes),
        # Over the model, not within a step: a heap that kept the last step's memory grows no more.
        ("memory", MAX_RSS_SHARE, ours.rss_over_model_bytes / plain.rss_over_model_bytes),
    ):
        if workload in limits:
            limit = limits[workload]
            found.append(
                Target(f"peak {what} <= {limit:.0%} of plain", f"{share:.1%}", share <= limit)
            )
    recomputed = by_mode.get("checkpoint")
    if recomputed is not None:
        speed = ours.step_seconds.median / recomputed.step_seconds.median
        share = ours.live_bytes / recomputed.live_bytes
        found.append(Target("faster than checkpoint", f"{speed:.2f} of its time", speed < 1))
        found.append(
            Target("less memory than checkpoint", f"{share:.0%} of its activations", share < 1)
        )
    files = by_mode.get("torch_save")
    if files is not None:
        base = plain.step_seconds.median
        ours_over, files_over = ours.step_seconds.median - base, files.step_seconds.median - base
        gain = files_over / ours_over if ours_over > 0 else float("inf")
        told = f"{ours_over:+.2f} s beside {files_over:+.2f} s"
        holds = files_over > 0 and gain >= MIN_GAIN_OVER_FILES
        found.append(Target("a fifth of the torch.save hook's overhead at most", told, holds))
    return found


def differing(results: Results) -> list[str]:
    """Modes whose losses or gradients are not those of the first run, bit for bit."""
    runs = [(mode, run) for mode, of_mode in results.items() for run in of_mode]
    first = runs[0][1]
    same = ("losses", "gradients")
    return sorted({mode for mode, run in runs if any(run[key] != first[key] for key in same)})


def conditions(task: Task, directory: str) -> dict[str, Any]:
    """What the figures depend on beside the code."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "workload": preset(task.workload).summary,
        "cpu": f"{host_facts().cpu}, {os.cpu_count()} visible",
        "memory_bytes": total_memory_bytes(),
        "disk": filesystem_of(directory).kind,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def run_rounds(task: Task, modes: list[str], rounds: int, console: Console) -> Results:
    """All modes, round after round, each in a process of its own."""
    results: Results = {mode: [] for mode in modes}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=rounds * len(modes))
        for number in range(rounds):
            for mode in modes:
                progress.update(bar, description=f"round {number + 1}: {mode}")
                beside = _traffic(results["offload"][-1]) if mode == "plain+disk" else None
                arguments = json.dumps({**asdict(task), "mode": mode, "traffic": beside})
                results[mode].extend(worker_messages([str(WORKER), arguments]))
                progress.advance(bar)
    return results


def _traffic(offloaded: dict[str, Any]) -> tuple[float, float] | None:
    """Bytes a second that this run wrote and read; ``None`` if it moved nothing."""
    seconds = Spread.of(offloaded["seconds"]).median
    moved = offloaded["per_step"]
    rates = moved["written_bytes"] / seconds, moved["read_bytes"] / seconds
    return rates if any(rates) else None


@click.command(epilog="Modes: " + "; ".join(f"{mode}: {what}" for mode, what in MODES.items()))
@click.option("--workload", type=click.Choice(list(PRESETS)), default="gpt", show_default=True)
@click.option("--modes", callback=names_of(MODES), default="all", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--threads", type=click.IntRange(min=1), help="Threads of torch [its default].")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--engine", type=click.Choice(["native", "aio"]), help="Disk engine.")
@click.option("--disk-dir", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--option", "options", metavar="NAME=VALUE", multiple=True, help="Session option.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def main(
    workload: str,
    modes: list[str],
    rounds: int,
    steps: int,
    threads: int | None,
    seed: int,
    engine: str | None,
    disk_dir: str | None,
    options: tuple[str, ...],
    as_json: bool,
    quiet: bool,
) -> None:
    """Compare ways to hold activations by the time and memory of a training step."""
    if "plain+disk" in modes and "offload" not in modes[: modes.index("plain+disk")]:
        raise click.UsageError("mode plain+disk moves what offload did: name offload before it")
    directory = disk_dir or os.environ.get("OFFLOAD_DIR") or tempfile.gettempdir()
    try:
        session = session_options(options, engine=engine, disk_dir=directory)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    task = Task("plain", workload, steps, seed, threads, session)
    context = conditions(task, directory)
    try:
        results = run_rounds(task, modes, rounds, Console(stderr=True, quiet=quiet or as_json))
    except OffloadError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(3)
    summaries = summarise(results)
    different = differing(results)
    reached = targets(workload, summaries)
    if as_json:
        document = {
            "format": JSON_FORMAT,
            "conditions": context,
            "task": asdict(task),
            "rounds": rounds,
            "summaries": [asdict(s) for s in summaries],
            "targets": [asdict(t) for t in reached],
            "differing_modes": different,
            "runs": results,
        }
        click.echo(json.dumps(document))
    else:
        _print(context, summaries, reached, different, rounds)
    sys.exit(1 if different else 0)


def _print(
    context: dict[str, Any],
    summaries: list[Summary],
    reached: list[Target],
    different: list[str],
    rounds: int,
) -> None:
    console = Console(width=max(132, Console().width), highlight=False)
    for name, value in context.items():
        shown = format_bytes(value) if name.endswith("_bytes") else value
        console.print(f"{name:13} {shown}")
    count = summaries[0].step_seconds.count
    table = Table(title=f"Medians of {count} steps a mode in {rounds} rounds, range in brackets")
    table.add_column("mode")
    headings = "step s|to plain|live|growth in step|over model|faults|written|read|waited"
    for heading in headings.split("|"):
        table.add_column(heading, justify="right")
    for s in summaries:
        seconds = s.step_seconds
        ratio = s.ratio
        table.add_row(
            s.mode,
            f"{seconds.median:.2f} [{seconds.low:.2f}-{seconds.high:.2f}]".replace("[", r"\["),
            f"{ratio.median:.3f} \\[{ratio.low:.2f}-{ratio.high:.2f}]" if ratio else "",
            *(f"{b / 1e6:.0f} MB" for b in (s.live_bytes, s.rss_growth_bytes)),
            f"{s.rss_over_model_bytes / 1e6:.0f} MB",
            f"{s.minor_faults / 1000:.0f} k",
            *(f"{b / 1e6:.0f} MB" for b in (s.written_bytes, s.read_bytes)),
            f"{s.stall_seconds:.2f} s",
        )
    console.print(table)
    for target in reached:
        mark = "[green]pass[/]" if target.holds else "[red]FAIL[/]"
        console.print(f"{mark}  {target.what}: {target.measured}")
    if different:
        console.print(f"[red]FAIL[/]  same bits in all modes: not in {', '.join(different)}")
    else:
        console.print("[green]pass[/]  losses and gradients have the same bits in all modes")


if __name__ == "__main__":
    main()
