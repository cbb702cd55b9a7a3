"""Trains under a hard limit of memory: which ways to hold activations live through it, how fast.

Each mode of bench_step.py runs in a fresh process inside a control group whose memory is limited; a
process that needs more is killed by the kernel. Linux, and root for the control group.

    sudo python scripts/bench_limit.py --limit 1200MB --workload gpt

Exit status: 0, whoever was killed; 2 for wrong usage; 3 if a run failed for another reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from listed import names_of
from rich.console import Console
from rich.table import Table
from step_worker import MODES, Task

from offload.units import format_bytes, parse_bytes
from offload.workloads import PRESETS

ALONE = [mode for mode in MODES if mode != "plain+disk"]  # which needs what another one measured
WORKER = Path(__file__).with_name("step_worker.py")
ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def limited_group(limit_bytes: int) -> Iterator[Path]:
    """A control group with at most ``limit_bytes`` of memory and no swap, removed in the end."""
    old = (ROOT / "memory").is_dir()  # version 1 has a tree for each controller
    group = (ROOT / "memory" if old else ROOT) / f"offload-bench-{os.getpid()}"
    group.mkdir()
    try:
        name = "memory.limit_in_bytes" if old else "memory.max"
        (group / name).write_text(str(limit_bytes))
        if not old:
            (group / "memory.swap.max").write_text("0")
        yield group
    finally:
        group.rmdir()


def run(task: Task, group: Path) -> dict[str, Any] | None:
    """The figures of one mode; ``None`` if the kernel killed it."""
    done = subprocess.run(
        [sys.executable, str(WORKER), json.dumps(asdict(task))],
        capture_output=True,
        text=True,
        preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())),
    )
    if done.returncode == -signal.SIGKILL:
        return None
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no message"
        click.echo(f"Error: {task.mode}: {reason}", err=True)
        sys.exit(3)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _size(_: click.Context, __: click.Parameter, value: str) -> int:
    try:
        return parse_bytes(value, "limit")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.option("--limit", callback=_size, default="1200MB", show_default=True)
@click.option("--workload", type=click.Choice(list(PRESETS)), default="gpt", show_default=True)
@click.option(
    "--modes", callback=names_of(ALONE), default="plain,checkpoint,offload", show_default=True
)
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--disk-dir", type=click.Path(exists=True, file_okay=False, writable=True))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document and nothing else.")
def main(
    limit: int, workload: str, modes: list[str], steps: int, disk_dir: str | None, as_json: bool
) -> None:
    """Train under a hard limit of memory, by way to hold activations."""
    session = {"disk_dir": disk_dir or os.environ.get("OFFLOAD_DIR") or tempfile.gettempdir()}
    try:
        with limited_group(limit) as group:
            results = {
                mode: run(Task(mode, workload, steps, seed=0, session=session), group)
                for mode in modes
            }
    except OSError as error:
        raise click.UsageError(
            f"no control group with a memory limit can be made here ({error}): that takes root and "
            "the memory controller"
        ) from None
    if as_json:
        click.echo(json.dumps({"format": 1, "limit_bytes": limit, "results": results}))
        return
    table = Table(title=f"{workload} in {format_bytes(limit)} of memory")
    for heading in ("mode", "model and gradients", "step s"):
        table.add_column(heading, justify="left" if heading == "mode" else "right")
    for mode, r in results.items():
        if r is None:
            table.add_row(mode, "", "killed")
        else:
            seconds = statistics.median(r["seconds"])
            table.add_row(mode, format_bytes(r["model_rss_bytes"]), f"{seconds:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
