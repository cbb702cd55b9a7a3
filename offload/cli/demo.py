"""``offload demo``: trains one model twice, plain and offloaded, and compares every bit.

Each run has a process of its own (``python -m offload.cli.demo TASK``), one after the other, as
memory and time depend on what a process did before. The worker reports a step per line; this
module's command shows them side by side. What is equal is compared as bits: the loss as a
hexadecimal float, gradients and final parameters as hashes of all their bytes.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from offload.cli import arguments, terminal
from offload.cli.failure import Failure
from offload.cli.running import options_of
from offload.errors import OffloadError
from offload.measure import (
    activation_meter,
    fingerprint,
    mark_memory,
    worker_messages,
)
from offload.report.tables import FigureTable, Prose
from offload.session import Session
from offload.units import format_bytes, format_seconds
from offload.workloads import PRESETS, TrainableModel, preset

__all__ = ["Run", "Task", "command", "differences"]

JSON_FORMAT = 1
WARMUP_STEPS = 2  # trained and compared like all others, but left out of times
LEARNING_RATE = 6e-4


@dataclass(frozen=True)
class Task:
    """What one worker process trains.

    Args:
        offloaded: with a session, or plain.
        workload: name of a preset.
        steps: optimizer steps, the warm-up included.
        seed: of parameters and batches.
        threads: of torch; None leaves its default.
        session: options of the session.
        flip_bit_at: step whose gradients get one bit wrong on purpose, to see the comparison fail.
    """

    offloaded: bool
    workload: str
    steps: int
    seed: int
    threads: int | None = None
    session: dict[str, Any] = field(default_factory=dict)
    flip_bit_at: int | None = None


@dataclass
class Run:
    """What a worker reported: one entry per step in each list, the rest about the whole run.

    Attributes:
        losses: as hexadecimal floats.
        gradients: hash of all gradients after each backward.
        seconds: forward and backward of each step, without the optimizer.
        parameters: hash of all parameters at the end.
        held_out_loss: on data never trained on, as a hexadecimal float.
        peak_live_bytes: most bytes of saved activations, staging memory included.
        peak_rss_growth_bytes: most resident memory above that of model, gradients and optimizer.
        minor_faults: page faults per measured step.
        report: the session's, over all steps; None for a plain run.
        advice: what that calls for, in sentences.
    """

    losses: list[str] = field(default_factory=list)
    gradients: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    parameters: str = ""
    held_out_loss: str = ""
    peak_live_bytes: int = 0
    peak_rss_growth_bytes: int = 0
    minor_faults: int = 0
    report: dict[str, Any] | None = None
    advice: str = ""

    @property
    def median_seconds(self) -> float:
        """Median step time after the warm-up."""
        return statistics.median(self.seconds[WARMUP_STEPS:])


def differences(plain: Run, offloaded: Run) -> list[str]:
    """What is not the same to the last bit, in words; empty if everything is.

    Example:
        >>> a = Run(losses=["0x1.0p+0"], gradients=["aa"])
        >>> differences(a, Run(losses=["0x1.0p+0"], gradients=["ab"]))
        ['the gradients of step 1']
    """
    found: list[str] = []
    if len(plain.losses) != len(offloaded.losses):
        found.append(f"the number of steps, {len(plain.losses)} and {len(offloaded.losses)}")
    for what in ("losses", "gradients"):
        pairs = zip(getattr(plain, what), getattr(offloaded, what), strict=False)
        name = "loss" if what == "losses" else "gradients"
        found += [f"the {name} of step {i}" for i, (a, b) in enumerate(pairs, 1) if a != b]
    if plain.parameters != offloaded.parameters:
        found.append("the final parameters")
    if plain.held_out_loss != offloaded.held_out_loss:
        found.append("the loss on held-out data")
    return found


# -- the worker ------------------------------------------------------------------------------------


def train(task: Task) -> Iterator[dict[str, Any]]:
    """Train as ``task`` says; yields a message per step and one at the end."""
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    workload = preset(task.workload)
    model = workload.build(task.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    batches = list(workload.batches(task.steps, task.seed))
    _settle(model, optimizer)
    base = mark_memory()
    opened: AbstractContextManager[Session | None] = nullcontext()
    if task.offloaded:
        opened = Session(**task.session)
    faults: list[int] = []
    with opened as session:
        meter = activation_meter(model, session)
        for number, batch in enumerate(batches, 1):
            faults.append(base.faults_since())
            started = time.perf_counter()
            with session.step() if session else nullcontext():
                with meter:
                    loss = workload.step(model, batch)
                torch.autograd.backward(loss)
            seconds = time.perf_counter() - started
            if number == task.flip_bit_at:
                _flip_one_bit(model)
            yield {
                "losses": float(loss.item()).hex(),
                "gradients": fingerprint(p.grad for p in model.parameters() if p.grad is not None),
                "seconds": seconds,
            }
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        faults.append(base.faults_since())
        report = session.report() if session else None
    growth_bytes = base.peak_growth_bytes()
    with torch.no_grad():
        held_out = next(workload.batches(1, task.seed, held_out=True))
        held_out_loss = workload.step(model.eval(), held_out)
    yield {
        "parameters": fingerprint(model.parameters()),
        "held_out_loss": float(held_out_loss.item()).hex(),
        "peak_live_bytes": meter.peak_bytes,
        "peak_rss_growth_bytes": growth_bytes,
        "minor_faults": (faults[-1] - faults[WARMUP_STEPS]) // max(1, task.steps - WARMUP_STEPS),
        "report": report.to_dict() if report else None,
        "advice": " ".join(f"{a.what}: {a.hint}." for a in report.advice()) if report else "",
    }


def _settle(model: TrainableModel, optimizer: torch.optim.Optimizer) -> None:
    # Gradients and optimizer state are no activations: they exist before the memory mark. A step at
    # a rate of zero makes the state and leaves the parameters as they are. A whole training step
    # would not do: it leaves holes in the heap that the measured steps then spread over.
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE


def _flip_one_bit(model: TrainableModel) -> None:
    gradient = next(p.grad for p in model.parameters() if p.grad is not None)
    gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1)


# -- the command -----------------------------------------------------------------------------------


@click.command("demo", short_help="Train a small GPT twice, and compare every bit.")
@click.option(
    "--steps",
    type=click.IntRange(min=WARMUP_STEPS + 1),
    metavar="NUMBER",
    help="Optimizer steps [6; with --quick 5].",
)
@click.option(
    "--workload",
    type=click.Choice(list(PRESETS)),
    metavar="NAME",
    help=f"Model and data, one of {', '.join(PRESETS)} [demo].",
)
@click.option("--quick", is_flag=True, help="A smaller model and 5 steps.")
@arguments.of_a_session
@arguments.seed
@arguments.threads
@arguments.json_format
@arguments.quiet
@click.option(
    "--flip-bit-at", type=int, hidden=True, help="Step whose gradient gets one bit wrong."
)
def command(
    steps: int | None,
    workload: str | None,
    quick: bool,
    seed: int,
    threads: int | None,
    as_json: bool,
    quiet: bool,
    flip_bit_at: int | None,
    **given: Any,
) -> None:
    """Train a small GPT plain and offloaded, and compare every bit.

    The model learns to predict the next character of the sources of Python's standard library. Both
    runs have a process of their own. Exit status: 0 if all losses, gradients and parameters are the
    same to the last bit, 1 if not, 2 for wrong usage, 3 if a run failed.
    """
    name = workload or ("demo-quick" if quick else "demo")
    plain_task = Task(False, name, steps or (5 if quick else 6), seed, threads)
    offloaded_task = replace(
        plain_task, offloaded=True, session=options_of(given), flip_bit_at=flip_bit_at
    )
    console = terminal.results(quiet=quiet or as_json)
    summary = Text.assemble((preset(name).summary, "bold"), f", {plain_task.steps} steps, twice")
    console.print(Prose(summary))
    try:
        plain = _run(plain_task, quiet=quiet or as_json)
        offloaded = _run(offloaded_task, quiet=quiet or as_json)
    except (OffloadError, OSError) as error:
        raise Failure(str(error)) from None
    found = differences(plain, offloaded)
    if as_json:
        terminal.print_json(_document(plain_task, plain, offloaded, found))
    else:
        console.print(_curves(plain, offloaded), _summary(plain, offloaded))
        terminal.results(wrapped=not quiet).print(Prose(_verdict(plain, offloaded, found)))
    sys.exit(1 if found else 0)


def _run(task: Task, *, quiet: bool) -> Run:
    run = Run()
    columns = (
        TextColumn("{task.description:10}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with terminal.progress(*columns, quiet=quiet) as progress:
        name = "offloaded" if task.offloaded else "plain"
        bar = progress.add_task(name, total=task.steps, loss="")
        for message in worker_messages(["-m", "offload.cli.demo", json.dumps(asdict(task))]):
            for key, value in message.items():
                values = getattr(run, key)
                if isinstance(values, list):
                    values.append(value)
                else:
                    setattr(run, key, value)
            if "losses" in message:
                loss = float.fromhex(message["losses"])
                progress.update(bar, advance=1, loss=f"loss {loss:.4f}")
    return run


def _curves(plain: Run, offloaded: Run) -> FigureTable:
    table = FigureTable(title="Loss and gradients, step by step")
    table.add_figures("step", "plain", "offloaded", "loss", "gradients")
    steps = zip(plain.losses, offloaded.losses, plain.gradients, offloaded.gradients, strict=False)
    for number, (loss, other, gradients, others) in enumerate(steps, 1):
        table.add_row(
            str(number),
            f"{float.fromhex(loss):.6f}",
            f"{float.fromhex(other):.6f}",
            _same_or_not(loss == other),
            _same_or_not(gradients == others),
        )
    return table


def _same_or_not(same: bool) -> Text:
    return Text("same bits", "green") if same else Text("DIFFERENT", "bold red")


def _summary(plain: Run, offloaded: Run) -> FigureTable:
    table = FigureTable(title="Cost, median of the steps after the warm-up")
    table.add_column()
    table.add_figures("plain", "offloaded", "ratio")

    def add(what: str, a: float, b: float, show: Callable[[float], str]) -> None:
        table.add_row(what, show(a), show(b), f"{b / a:.2f}" if a else "")

    add("step time", plain.median_seconds, offloaded.median_seconds, format_seconds)
    add("activations alive, peak", plain.peak_live_bytes, offloaded.peak_live_bytes, format_bytes)
    growth = (plain.peak_rss_growth_bytes, offloaded.peak_rss_growth_bytes)
    add("resident memory growth, peak", *growth, format_bytes)
    add("page faults per step", plain.minor_faults, offloaded.minor_faults, "{:,.0f}".format)
    report = offloaded.report or {}
    overlap = report.get("overlap")
    rows = {
        "written": format_bytes(report.get("written_bytes", 0)),
        "read": format_bytes(report.get("read_bytes", 0)),
        "transfers hidden": "no transfers" if overlap is None else f"{overlap:.1%}",
        "waited for reads": format_seconds(report.get("stall_seconds", 0.0)),
        "waited for room": format_seconds(report.get("backpressure_seconds", 0.0)),
    }
    table.add_section()
    for what, value in rows.items():
        table.add_row(f"{what}, all steps", "", value, "")
    for warning in report.get("warnings", ()):
        table.add_row("warning", "", warning, "", style="yellow")
    return table


def _verdict(plain: Run, offloaded: Run, found: list[str]) -> Text:
    if found:
        return Text.assemble(("Not the same:", "bold red"), f" {', '.join(found)} differ.")
    steps = len(plain.losses)
    moved = (offloaded.report or {}).get("offloaded_bytes", 0)
    told = Text.assemble(
        ("Bit for bit the same", "bold green"),
        f": {steps} losses, the gradients of {steps} steps, the final parameters and the held-out "
        f"loss, {float.fromhex(plain.held_out_loss):.4f}.",
    )
    if not moved:
        told.append(f" But {offloaded.advice}", "yellow")
    return told


def _document(task: Task, plain: Run, offloaded: Run, found: list[str]) -> dict[str, Any]:
    return {
        "format": JSON_FORMAT,
        "workload": task.workload,
        "summary": preset(task.workload).summary,
        "steps": task.steps,
        "warmup_steps": WARMUP_STEPS,
        "seed": task.seed,
        "torch": torch.__version__,
        "same_bits": not found,
        "differences": found,
        "step_time_ratio": offloaded.median_seconds / plain.median_seconds,
        "plain": asdict(plain),
        "offloaded": asdict(offloaded),
    }


def _work(arguments: list[str]) -> None:
    """The worker's main: one JSON line per step on standard output."""
    for message in train(Task(**json.loads(arguments[0]))):
        print(json.dumps(message), flush=True)


if __name__ == "__main__":
    _work(sys.argv[1:])
