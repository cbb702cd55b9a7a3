"""Step time and peak memory of a Llama-shaped block stack on an accelerator, by way to hold its
activations: plain, recomputed, torch's own copies to pinned memory, other packages', ours.

Every case runs in a fresh process: two steps to warm up, then the timed ones. Step time is that of
forward and backward between two synchronisations; memory is the peak that torch's allocator saw
within the timed steps, above the model with its gradients. ``link`` measures the bare pinned copy
in both directions, alone and at once, which is the physical limit of what offloading can move.

    python scripts/bench_accelerator.py --tokens 4096,8192,32768 --layers 8
    python scripts/bench_accelerator.py --modes plain,offload --json

Exit status: 0; 1 if our gradients differ from plain's, or a run failed for another reason than lack
of memory; 2 for wrong usage.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import click
import torch
from listed import names_of, numbers
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import offload
from offload.measure import fingerprint
from offload.units import format_bytes
from offload.workloads.llama import LlamaBlock, LlamaConfig

JSON_FORMAT = 1
LINK_BYTES = 256 << 20
MODES = {
    "plain": "nothing",
    "checkpoint": "torch.utils.checkpoint around every block",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu(pin_memory=True)",
    "torchtune": "torchtune's OffloadActivations, where installed",
    "trl": "TRL's OffloadActivations, where installed",
    "offload": "offload.Session",
}


@dataclass(frozen=True)
class Case:
    """One process: a mode at a length."""

    mode: str
    tokens: int
    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    steps: int
    disk_dir: str | None


class Stack(torch.nn.Module):
    """The blocks alone: what surrounds them in a model is not what offloading moves."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__()
        config = LlamaConfig(
            layers=case.layers, width=case.width, heads=case.heads, kv_heads=case.kv_heads,
            hidden=case.hidden, length=case.tokens,
        )  # fmt: skip
        with torch.device(device):
            self.blocks = torch.nn.ModuleList(LlamaBlock(config) for _ in range(case.layers))
            head = case.width // case.heads
            frequencies = config.rope_base ** (-torch.arange(0, head, 2) / head)
            angles = torch.outer(torch.arange(case.tokens), frequencies).repeat(1, 2)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()
        self.bfloat16()

    def forward(self, x: torch.Tensor, wrap: Callable[..., Any] | None) -> torch.Tensor:
        for block in self.blocks:
            run = block if wrap is None else partial(wrap, block, use_reentrant=False)
            x = run(x, self.cos, self.sin)
        return x.float().square().mean()


@contextmanager
def opened(mode: str, disk_dir: str | None) -> Iterator[Callable[[], AbstractContextManager[Any]]]:
    """What makes the context of one step."""
    if mode == "offload":
        with offload.Session(disk_dir=disk_dir) as session:
            yield session.step
    elif mode == "save_on_cpu":
        yield partial(save_on_cpu, pin_memory=True)
    elif mode == "torchtune":
        from torchtune.training import OffloadActivations

        yield partial(OffloadActivations, use_streams=True)
    elif mode == "trl":
        from trl.models.activation_offloading import OffloadActivations

        yield partial(OffloadActivations, use_streams=True)
    else:
        yield nullcontext


def measure(case: Case) -> dict[str, Any]:
    """The figures of one case."""
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    torch.manual_seed(0)
    stack = Stack(case, device)
    x = torch.randn(1, case.tokens, case.width).to(device, torch.bfloat16)
    for parameter in stack.parameters():
        parameter.grad = torch.zeros_like(parameter)
    wrap = checkpoint if case.mode == "checkpoint" else None
    seconds = []
    with opened(case.mode, case.disk_dir) as step:
        torch.accelerator.synchronize()
        base_bytes = torch.accelerator.memory_allocated()
        for number in range(case.steps + 2):
            if number == 2:
                torch.accelerator.reset_peak_memory_stats()
            for parameter in stack.parameters():
                parameter.grad.zero_()
            torch.accelerator.synchronize()
            started = time.perf_counter()
            with step():
                loss = stack(x, wrap)
                loss.backward()
            torch.accelerator.synchronize()
            seconds.append(time.perf_counter() - started)
    return {
        "seconds": seconds[2:],
        "peak_bytes": torch.accelerator.max_memory_allocated() - base_bytes,
        "loss": loss.item().hex(),
        "gradients": fingerprint(p.grad.cpu() for p in stack.parameters()),
    }


def measure_link() -> dict[str, float]:
    """Bytes per second of bare pinned copies: out, in, and each while the other runs."""
    device = torch.device(torch.accelerator.current_accelerator().type, 0)
    host = [torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    there = [torch.empty(LINK_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.Stream(device=device) for _ in range(2)]

    def rate(*copies: Callable[[], Any]) -> float:
        rates = []
        for _ in range(5):
            torch.accelerator.synchronize()
            started = time.perf_counter()
            for stream, copy in zip(streams, copies, strict=False):
                with stream:
                    copy()
            torch.accelerator.synchronize()
            rates.append(LINK_BYTES / (time.perf_counter() - started))
        return statistics.median(rates)

    out = partial(host[0].copy_, there[0], non_blocking=True)
    back = partial(there[1].copy_, host[1], non_blocking=True)
    return {"d2h": rate(out), "h2d": rate(back), "both_at_once": rate(out, back)}


def run_case(case: Case | None) -> dict[str, Any]:
    """Run a case (or the link, for ``None``) in a process of its own."""
    argument = json.dumps(asdict(case)) if case is not None else "null"
    done = subprocess.run(
        [sys.executable, __file__, "--worker", argument], capture_output=True, text=True
    )
    if done.returncode == 0:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result
    reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
    for short in ("OutOfMemoryError", "ModuleNotFoundError"):
        if short in done.stderr:
            return {"missing": "out of memory" if "Memory" in short else "not installed"}
    raise click.ClickException(f"{case.mode if case else 'link'}: {reason}")


def table_of(tokens: int, results: dict[str, dict[str, Any]]) -> Table:
    """One length, all modes."""
    table = Table(title=f"{tokens} tokens")
    for heading in ("mode", "step ms", "to plain", "peak over model", "to plain", "bits"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    plain = results.get("plain", {})
    for mode, r in results.items():
        if "missing" in r:
            table.add_row(mode, r["missing"], "", "", "", "")
            continue
        seconds = statistics.median(r["seconds"])
        ratios = ("", "")
        if "seconds" in plain:
            times = seconds / statistics.median(plain["seconds"])
            ratios = (f"{times:.3f}", f"{r['peak_bytes'] / plain['peak_bytes']:.0%}")
        same = "" if "gradients" not in plain else str(r["gradients"] == plain["gradients"])
        table.add_row(
            mode, f"{1e3 * seconds:.1f}", ratios[0], format_bytes(r["peak_bytes"]), ratios[1], same
        )
    return table


def same_bits(results: dict[str, dict[str, Any]]) -> bool:
    """Whether offloading gave the gradients of plain training, where both ran."""
    found = {results[m].get("gradients") for m in ("plain", "offload") if m in results}
    return len(found - {None}) <= 1


@click.command(epilog="Modes: " + "; ".join(f"{mode}: {what}" for mode, what in MODES.items()))
@click.option("--tokens", callback=numbers, default="4096,8192,32768", show_default=True)
@click.option("--modes", callback=names_of(MODES), default="all", show_default=True)
@click.option("--layers", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--width", type=click.IntRange(min=1), default=4096, show_default=True)
@click.option("--hidden", type=click.IntRange(min=1), default=14336, show_default=True)
@click.option("--heads", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--kv-heads", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--disk-dir", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def main(tokens: list[int], modes: list[str], as_json: bool, **sizes: Any) -> None:
    """Compare ways to hold activations of a Llama-shaped block stack on an accelerator."""
    if not torch.accelerator.is_available():
        raise click.UsageError("this machine has no accelerator")
    console = Console(stderr=as_json, highlight=False)
    link = run_case(None)
    console.print("link GB/s:", {k: round(v / 1e9, 1) for k, v in link.items()})
    results: dict[int, dict[str, dict[str, Any]]] = {}
    for length in tokens:
        results[length] = {m: run_case(Case(mode=m, tokens=length, **sizes)) for m in modes}
        console.print(table_of(length, results[length]))
    if as_json:
        kind = str(torch.accelerator.current_accelerator())
        document = {
            "format": JSON_FORMAT, "torch": torch.__version__, "accelerator": kind, "link": link,
            "sizes": sizes, "results": results,
        }  # fmt: skip
        click.echo(json.dumps(document))
    sys.exit(0 if all(same_bits(of_length) for of_length in results.values()) else 1)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        arguments = json.loads(sys.argv[2])
        print(json.dumps(measure_link() if arguments is None else measure(Case(**arguments))))
    else:
        main()
