"""Train a GPT on several ranks with FSDP2 or DDP, with activations offloaded, and compare the bits.

    torchrun --nproc-per-node=2 scripts/train_fsdp.py
    torchrun --nproc-per-node=2 scripts/train_fsdp.py --plan 40MiB

The model learns to predict the next character of the sources of Python's standard library; every
rank takes other windows of it. By default it is trained twice from the same start, without a
session and with one: losses, the gradients of every rank in every step and the parameters in the
end must be the same to the last bit. Exit status: 0 if they are, 1 if not, 2 for wrong usage.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import offload
from offload.cli.merge_traces import merged_trace
from offload.distributed import RankReports, gather
from offload.errors import PlanError
from offload.measure import activation_meter, fingerprint, session_options
from offload.planner.applied import Planned
from offload.profiler import profile
from offload.recompute.rules import Rules
from offload.units import format_bytes, format_seconds
from offload.workloads import PRESETS, Workload, preset

JSON_FORMAT = 1
WARMUP_STEPS = 1  # left out of times
STEPS, PLANNED_STEPS = 5, 16
RECOMPUTE = {"blocks.*": "recompute+disk"}
HELD_OUT_BATCHES = 4


@dataclass
class Run:
    """What one rank saw of one training."""

    losses: list[str] = field(default_factory=list)  # as hexadecimal floats
    gradients: list[str] = field(default_factory=list)  # hashes of this rank's shards
    parameters: str = ""
    seconds: list[float] = field(default_factory=list)
    held_out_loss: float = 0.0
    peak_live_bytes: int = 0
    plan: dict[str, str] = field(default_factory=dict)  # what it came to: actions by segment
    budget_bytes: int = 0

    def settled_seconds(self) -> list[float]:
        """Of the steps after those that warm up, or measure."""
        return self.seconds[PLANNED_STEPS // 2 if self.plan else WARMUP_STEPS :]

    def bits(self) -> tuple[object, ...]:
        """What must not depend on offloading."""
        return self.losses, self.gradients, self.parameters, self.held_out_loss


def parallel(model: nn.Module, kind: str, device: torch.device) -> nn.Module:
    """``model``, spread over the ranks."""
    model.to(device)
    if kind == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids)
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def shard(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def train(
    workload: Workload,
    kind: str,
    steps: int,
    device: torch.device,
    session: offload.Session | None,
    rules: Rules | str | None = None,
) -> Run:
    """``steps`` of AdamW from the same start on every rank, each with batches of its own; in the
    session what ``rules`` say becomes of activations.
    """
    rank, run = dist.get_rank(), Run()
    inner = workload.build(seed=0)
    model = parallel(inner, kind, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    meter = activation_meter(model, session)
    applied: Any = contextlib.nullcontext()
    if session is not None and rules is not None:
        applied = session.apply(inner, rules)
    with applied:
        for batch in workload.batches(steps, seed=1 + rank):
            started = time.perf_counter()
            with session.step() if session is not None else contextlib.nullcontext():
                with meter:
                    loss = workload.step(model, tuple(t.to(device) for t in batch))
                loss.backward()
            run.losses.append(float(loss.item()).hex())
            run.seconds.append(time.perf_counter() - started)
            run.gradients.append(
                fingerprint(shard(p.grad) for p in model.parameters() if p.grad is not None)
            )
            optimizer.step()
            optimizer.zero_grad()
            del loss
    if isinstance(applied, Planned):
        plan = applied.plan
        run.plan = plan.actions if plan is not None else {}
        run.budget_bytes = 0 if session is None else session.config.device_budget or 0
    run.parameters = fingerprint(shard(p) for p in model.parameters())
    run.peak_live_bytes = meter.peak_bytes
    run.held_out_loss = held_out_loss(workload, model, device)
    return run


def held_out_loss(workload: Workload, model: nn.Module, device: torch.device) -> float:
    """The mean loss of all ranks on text that training never sees."""
    batches = workload.batches(HELD_OUT_BATCHES, seed=1 + dist.get_rank(), held_out=True)
    with torch.no_grad():
        losses = [workload.step(model, tuple(t.to(device) for t in batch)) for batch in batches]
    mean = torch.stack(losses).mean()
    dist.all_reduce(mean)
    return float(mean.item()) / dist.get_world_size()


def profiled(
    workload: Workload, kind: str, device: torch.device, directory: Path, options: dict[str, Any]
) -> Path:
    """Profile a step on every rank; the ranks' timelines in one file."""
    rank = dist.get_rank()
    inner = workload.build(seed=0)
    model = parallel(inner, kind, device)
    batch = tuple(t.to(device) for t in next(workload.batches(1, seed=1 + rank)))

    def step() -> None:
        workload.step(model, batch).backward()
        model.zero_grad()

    # A fixed number of steps: all ranks run the same collectives.
    found = profile(step, model=inner, steps=3, warmup=1, name=workload.name, **options)
    directory.mkdir(parents=True, exist_ok=True)
    traces: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(traces, found.trace())
    path = directory / "ranks.json"
    if rank == 0:
        path.write_text(json.dumps(merged_trace(traces)))
    return path


def of_all_ranks(run: Run) -> list[Run]:
    """The runs of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, run)
    return found


def show(runs: dict[str, list[Run]], reports: RankReports | None, title: str) -> None:
    """The table for people."""
    table = Table(title=title)
    for heading in ("", *runs):
        table.add_column(heading, justify="right" if heading else "left")
    every = list(runs.values())
    rows = {
        "step time, median": [
            format_seconds(statistics.median(s for r in of for s in r.settled_seconds()))
            for of in every
        ],
        "activations alive, most of a rank": [
            format_bytes(max(r.peak_live_bytes for r in of)) for of in every
        ],
        "first loss, rank 0": [f"{float.fromhex(of[0].losses[0]):.4f}" for of in every],
        "held-out loss, all ranks": [f"{of[0].held_out_loss:.4f}" for of in every],
    }
    if any(of[0].plan for of in every):
        rows["budget of a rank, and its plan"] = [
            f"{format_bytes(of[0].budget_bytes)}: {_counted(of[0].plan)}" if of[0].plan else ""
            for of in every
        ]
    for name, values in rows.items():
        table.add_row(name, *values)
    console = Console(width=100)
    console.print(table)
    if reports is not None:
        console.print(reports.table())


def _counted(plan: dict[str, str]) -> str:
    return ", ".join(f"{n} {action}" for action, n in Counter(plan.values()).most_common())


def device_of(rank: int) -> torch.device:
    """An accelerator for each rank of the machine, or the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    torch.accelerator.set_device_index(rank)
    kind = torch.accelerator.current_accelerator()
    return torch.device(kind.type if kind is not None else "cpu", rank)


@click.command()
@click.option("--mode", type=click.Choice(["both", "plain", "offload"]), default="both")
@click.option("--parallel", "kind", type=click.Choice(["fsdp2", "ddp"]), default="fsdp2")
@click.option("--workload", "name", type=click.Choice(list(PRESETS)), default="demo-quick")
@click.option(
    "--steps",
    type=click.IntRange(min=WARMUP_STEPS + 1),
    help=f"Default: {STEPS}; {PLANNED_STEPS} with --plan, as the first {PLANNED_STEPS // 2} "
    "measure.",
)
@click.option("--recompute", is_flag=True, help="Recompute blocks, and offload their inputs.")
@click.option(
    "--plan",
    "budget",
    metavar="BUDGET",
    help="Most bytes of device memory (on the CPU, of activations) of each rank, 64MiB or auto: "
    "measure, then plan for it, one plan for all ranks.",
)
@click.option("--option", "options", metavar="NAME=VALUE", multiple=True, help="Of the session.")
@click.option(
    "--profile",
    "profile_into",
    type=click.Path(file_okay=False, path_type=Path),
    help="Profile a step as well, and put all ranks' timelines there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
@click.option("--quiet", is_flag=True, help="Print the verdict only.")
def main(
    mode: str,
    kind: str,
    name: str,
    steps: int | None,
    recompute: bool,
    budget: str | None,
    options: tuple[str, ...],
    profile_into: Path | None,
    as_json: bool,
    quiet: bool,
) -> None:
    """Train on several ranks, plain and offloaded, and compare every bit. Start with torchrun."""
    if "WORLD_SIZE" not in os.environ:
        raise click.UsageError("start it with torchrun --nproc-per-node=2 scripts/train_fsdp.py")
    if recompute and budget is not None:
        raise click.UsageError("--recompute is a rule for all blocks and --plan chooses: give one")
    try:
        given = session_options(options, device_budget=budget)
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    steps = steps or (STEPS if budget is None else PLANNED_STEPS)
    device = device_of(int(os.environ["LOCAL_RANK"]))
    torch.set_num_threads(1)
    dist.init_process_group()
    try:
        workload = preset(name)
        runs: dict[str, list[Run]] = {}
        reports = None
        if mode != "offload":
            runs["plain"] = of_all_ranks(train(workload, kind, steps, device, None))
        if mode != "plain":
            with offload.Session(**given) as session:
                rules = "auto" if budget is not None else RECOMPUTE if recompute else None
                run = train(workload, kind, steps, device, session, rules)
                runs["offloaded"] = of_all_ranks(run)
                reports = gather(session.report())
        same = None if len(runs) < 2 else _same(runs)
        if dist.get_rank() == 0:
            title = f"{kind}, {dist.get_world_size()} ranks on {device.type}: {workload.summary}"
            _tell(runs, reports, same, title, as_json, quiet)
        if profile_into is not None:
            path = profiled(workload, kind, device, profile_into, given)
            if dist.get_rank() == 0 and not (as_json or quiet):
                print(f"The timelines of all ranks are in {path}; ui.perfetto.dev opens it.")
    except PlanError as error:  # on all ranks alike
        raise click.ClickException(str(error)) from None
    finally:
        dist.destroy_process_group()
    sys.exit(1 if same is False else 0)


def _same(runs: dict[str, list[Run]]) -> bool:
    pairs = list(zip(runs["plain"], runs["offloaded"], strict=True))
    one_plan = all(offloaded.plan == pairs[0][1].plan for _, offloaded in pairs)
    return one_plan and all(plain.bits() == offloaded.bits() for plain, offloaded in pairs)


def _tell(
    runs: dict[str, list[Run]],
    reports: RankReports | None,
    same: bool | None,
    title: str,
    as_json: bool,
    quiet: bool,
) -> None:
    if as_json:
        found = {
            "format": JSON_FORMAT,
            "title": title,
            "same": same,
            "runs": {name: [asdict(run) for run in of] for name, of in runs.items()},
            "reports": reports.to_dict() if reports is not None else None,
        }
        print(json.dumps(found))
        return
    if not quiet:
        show(runs, reports, title)
    if same is not None:
        print(
            "Bit for bit the same on every rank: losses, gradients of every step, parameters."
            if same
            else "NOT the same: losses, gradients or parameters differ."
        )


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    main()
