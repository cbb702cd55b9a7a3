"""What a checkpoint costs in itself: ours beside torch's, around a block that computes very little.

Forward and backward of one region whose function is two cheap operations, so that nearly all of the
time is the checkpoint's own. The two alternate, and the ratio is the median over the rounds.

    python scripts/bench_checkpoint.py
    python scripts/bench_checkpoint.py --rounds 50 --json
    python scripts/bench_checkpoint.py --verify --rounds 10

With ``--verify``: what it costs to compare what is recomputed (``verify_recompute``), on steps of a
small GPT whose blocks are recomputed, beside the same steps with torch's checkpoint.

Exit status: 0, also where the target is missed; 2 for wrong usage.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from statistics import median
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import offload
from offload.workloads import PRESETS, preset

MAX_RATIO = 1.3
JSON_FORMAT = 1


class Block(nn.Module):
    """Two operations."""

    def forward(self, h: Tensor, mask: Tensor | None = None) -> Tensor:
        """About 10 us of work."""
        h = h.sin()
        return h.cos() if mask is None else (h * mask).cos()


class NormalisedBlock(nn.Module):
    """With a BatchNorm, whose statistics are set aside."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, h: Tensor) -> Tensor:
        """The cosine of what is normalised."""
        return torch.cos(self.norm(h))


def torchs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The checkpoint of torch, of the same kind."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def seconds_per_call(run: Callable[..., Any], call: Callable[..., Tensor], repeats: int) -> float:
    """Of one forward and backward."""
    start = time.perf_counter()
    for _ in range(repeats):
        call(run).sum().backward()
    return (time.perf_counter() - start) / repeats


def calls() -> dict[str, Callable[..., Tensor]]:
    """Ways to call a checkpoint, by name."""
    block, normalised = Block(), NormalisedBlock()
    x, mask = torch.ones(8, 8, requires_grad=True), torch.ones(8)
    return {
        "one tensor": lambda run: run(block, x),
        "a keyword argument": lambda run: run(block, x, mask=mask),
        "a tuple": lambda run: run(lambda t: block(*t), (x, mask)),
        "BatchNorm": lambda run: run(normalised, x),
    }


def verified(rounds: int, name: str) -> dict[str, Any]:
    """Seconds of a step of the workload, its blocks recomputed: by torch, and by rules in sessions
    that compare and that do not.
    """
    workload = preset(name)
    model = workload.build(seed=0)
    (batch,) = workload.batches(1, seed=0)
    seconds: dict[str, list[float]] = {"torch": [], "rules": [], "verified": []}

    def timed(kind: str, context: Any) -> None:
        model.zero_grad()
        start = time.perf_counter()
        with context:
            workload.step(model, batch).backward()
        seconds[kind].append(time.perf_counter() - start)

    sessions = {
        kind: offload.Session(verify_recompute=kind == "verified") for kind in ("rules", "verified")
    }
    for _ in range(rounds + 1):
        with _by_torch(model.blocks):
            timed("torch", nullcontext())
        for kind, session in sessions.items():
            with session.apply(model, {"blocks.*": "recompute"}):
                timed(kind, session.step())
    report = sessions["verified"].recompute_report()
    assert not report.drifted
    for session in sessions.values():
        session.close()
    measured = {kind: found[1:] for kind, found in seconds.items()}  # the first warms up
    rows = []
    for kind, found in measured.items():
        ratios = sorted(a / b for a, b in zip(found, measured["torch"], strict=True))
        spread = {"ratio": median(ratios), "ratio_range": [ratios[0], ratios[-1]]}
        rows.append({"kind": kind, "seconds": median(found), **spread})
    return {"workload": workload.summary, "recomputations": report.recomputations, "rows": rows}


@contextmanager
def _by_torch(blocks: Iterable[nn.Module]) -> Iterator[None]:
    for block in blocks:
        block.forward = partial(torchs, block.forward)
    yield
    for block in blocks:
        del block.forward


def tell_verified(found: dict[str, Any]) -> None:
    """The table for people."""
    table = Table("blocks recomputed", "step, median", "of torch's", title=found["workload"])
    names = {"torch": "torch.utils.checkpoint", "rules": "rules", "verified": "verify_recompute"}
    for row in found["rows"]:
        low, high = row["ratio_range"]
        ratio = f"{row['ratio']:.2f} [{low:.2f}-{high:.2f}]"
        table.add_row(names[row["kind"]], f"{row['seconds'] * 1e3:.0f} ms", ratio)
    Console().print(table)


@click.command(help=__doc__)
@click.option("--rounds", type=click.IntRange(min=1), default=20, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=100, show_default=True)
@click.option("--verify", is_flag=True, help="What verify_recompute costs.")
@click.option("--workload", type=click.Choice(list(PRESETS)), default="demo-quick")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def main(rounds: int, repeats: int, verify: bool, workload: str, as_json: bool) -> None:
    """Measure and print."""
    if verify:
        found = verified(rounds, workload)
        if as_json:
            click.echo(json.dumps({"format": JSON_FORMAT, "torch": torch.__version__, **found}))
        else:
            tell_verified(found)
        return
    torch.set_num_threads(1)
    rows = []
    for name, call in calls().items():
        for run in (torchs, offload.checkpoint):
            seconds_per_call(run, call, repeats)  # warms up
        ours, theirs = [], []
        for _ in range(rounds):
            theirs.append(seconds_per_call(torchs, call, repeats))
            ours.append(seconds_per_call(offload.checkpoint, call, repeats))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        rows.append(
            {
                "call": name,
                "torch_us": median(theirs) * 1e6,
                "ours_us": median(ours) * 1e6,
                "ratio": median(ratios),
                "ratio_range": [ratios[0], ratios[-1]],
            }
        )
    if as_json:
        click.echo(json.dumps({"format": JSON_FORMAT, "torch": torch.__version__, "calls": rows}))
        return
    table = Table("inputs", "torch", "ours", "ratio", f"at most {MAX_RATIO}")
    for row in rows:
        low, high = row["ratio_range"]
        table.add_row(
            row["call"],
            f"{row['torch_us']:.0f} us",
            f"{row['ours_us']:.0f} us",
            f"{row['ratio']:.2f} [{low:.2f}-{high:.2f}]",
            "yes" if row["ratio"] <= MAX_RATIO else "no",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
