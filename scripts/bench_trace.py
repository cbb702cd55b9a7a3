"""Measures what seeing costs: an event and a sample of the trace, and their share of a step.

An event is timed over many calls, in CPU time, and judged by the fastest run, which other work on
the machine has disturbed least; a step is timed with the trace as it is and with one that drops
everything, in turn. The share is told both ways: what the events of a step cost by themselves, and
the difference of the steps' times, which is lost in the noise of most machines.

    python scripts/bench_trace.py --workload demo --rounds 9
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import offload
from offload.measure import Spread, session_options
from offload.report.trace import Event, Sample, Subject, Trace, now_ns, ranged
from offload.workloads import PRESETS, preset

JSON_FORMAT = 1
CALLS = 100_000
TARGET_US = 1.0  # of one event
TARGET_SHARE = 0.01  # of a step


class NoTrace(Trace):
    """Drops everything."""

    def emit(self, *_: Any, **__: Any) -> None:
        """Nothing."""

    def sample(self, *_: Any) -> None:
        """Nothing."""


def cost_us(call: Any) -> Spread:
    """CPU time of one call, over nine runs."""
    runs = []
    for _ in range(9):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            call()
        runs.append((time.thread_time_ns() - start) / CALLS / 1e3)
    return Spread.of(runs)


def calls() -> dict[str, Spread]:
    """What the trace is asked to do, by name."""
    trace, about = Trace(), Subject(1, "blocks.0.mlp")

    def use_range() -> None:
        with ranged("offload::reload"):
            pass

    return {
        "event with times": cost_us(lambda: trace.emit("spill", 1, 4096, 1, 2, about)),
        "event now": cost_us(lambda: trace.emit("begin", -1, 0)),
        "sample of memory": cost_us(lambda: trace.add_sample((now_ns(), 1, 2, 3))),
        "what an event is about": cost_us(lambda: Subject(1, "blocks.0.mlp")),
        "range without a profiler": cost_us(use_range),
        "an empty call, for comparison": cost_us(lambda: None),
    }


def steps(
    workload: str, rounds: int, options: dict[str, Any]
) -> tuple[list[float], list[float], list[Event], list[Sample]]:
    """Seconds of steps with the trace and without, in turn, and what one step traces."""
    task = preset(workload)
    model = task.build(0)
    (batch,) = task.batches(1, 0)
    with offload.Session(**options) as session:
        common = session._tiers.common
        ours, none = common.trace, NoTrace()
        seconds: dict[Trace, list[float]] = {ours: [], none: []}
        for number in range(rounds + 1):
            for trace in (ours, none) if number % 2 else (none, ours):
                common.trace = trace
                ours.clear()
                start = time.perf_counter()
                with session.step():
                    torch.autograd.backward(task.step(model, batch))
                taken = time.perf_counter() - start
                session.drain()
                if trace is ours:
                    events, samples = ours.events(), ours.samples()
                if number:
                    seconds[trace].append(taken)
                model.zero_grad()
    return seconds[ours], seconds[none], events, samples


@click.command()
@click.option("--workload", type=click.Choice(list(PRESETS)), default="demo", show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=9, show_default=True)
@click.option("--option", "options", metavar="NAME=VALUE", multiple=True)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def main(workload: str, rounds: int, options: tuple[str, ...], as_json: bool) -> None:
    """Measure what the trace costs, by event and as a share of a step."""
    found = calls()
    with_trace, without, events, samples = steps(workload, rounds, session_options(options))
    median = statistics.median(with_trace)
    # About every event there is a Subject as well.
    traced_us = (
        len(events) * (found["event with times"].median + found["what an event is about"].median)
        + len(samples) * found["sample of memory"].median
    )
    share = traced_us / 1e6 / median
    ratio = Spread.of([a / b for a, b in zip(with_trace, without, strict=True)])
    slowest = max(s.low for name, s in found.items() if name.startswith(("event", "sample")))
    holds = slowest <= TARGET_US and share < TARGET_SHARE
    if as_json:
        document = {
            "format": JSON_FORMAT,
            "machine": {"cpus": os.cpu_count(), "kernel": platform.release()},
            "torch": torch.__version__,
            "workload": workload,
            "calls_us": {name: spread.median for name, spread in found.items()},
            "step": {"events": len(events), "samples": len(samples), "seconds": median},
            "share": share,
            "ratio": vars(ratio),
            "holds": holds,
        }
        click.echo(json.dumps(document, indent=2))
    else:
        console = Console(highlight=False)
        table = Table("call", "us", title="what seeing costs, CPU time, median \\[range]")
        for name, s in found.items():
            table.add_row(name, f"{s.median:.2f} \\[{s.low:.2f}-{s.high:.2f}]")
        console.print(table)
        console.print(
            f"a step of {workload} takes {median:.3f} s and traces {len(events)} events and "
            f"{len(samples)} samples: {traced_us:.0f} us, {share:.4%} of it; with the trace it "
            f"takes {ratio.median:.3f} \\[{ratio.low:.3f}-{ratio.high:.3f}] of its time without, "
            f"{rounds} rounds"
        )
        mark = "[green]pass[/]" if holds else "[red]FAIL[/]"
        console.print(f"{mark}  at most {TARGET_US} us an event and {TARGET_SHARE:.0%} of a step")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
