"""Compares tuning with trying everything: how good is what it finds, and in how many trials?

Every setting of a fixed grid is tried, each beside plain steps. Then ``offload.tune`` chooses from
the same grid under the same limit, with a fifth of the trials at most. In the end its choice and
the best of the grid run against each other and against plain steps, in turn, round after round: a
grid of noisy figures always has a lucky winner, and only this says which is better.

What was measured is kept in a file and not measured again, so that a long run can be cut in pieces:

    python scripts/bench_tune.py gpt --state gpt.json --minutes 1.5

Exit status: 0 if the choice takes at most 1.02 of the time of the grid's best; 1 if it does not; 4
if there is more to measure; 2 for wrong usage.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import attrs
import click
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import offload
from offload.cli.targets import target_of_workload
from offload.measure import Spread
from offload.probe import MachineProfile, machine_profile
from offload.session import Session
from offload.tuner import Setting
from offload.tuner.stopwatch import HostStopwatch
from offload.tuner.trial import Runner
from offload.units import MIB, format_bytes
from offload.workloads import PRESETS

JSON_FORMAT = 1
LEAST, WINDOWS, PREFETCHES = (1 * MIB, 6 * MIB), (4 * MIB, 32 * MIB), (0, 8 * MIB, 48 * MIB)
KEPT_SHARES = (0, 1 / 50, 1 / 8)  # of plain's bytes alive
MAX_RATIO = 1.02
MORE_TO_MEASURE = 4


class Bench:
    """The measurements so far, in a file, and the time that is left for more."""

    def __init__(
        self, path: Path, workload: str, minutes: float, share: float, repeats: int
    ) -> None:
        self.path = path
        self.until = time.monotonic() + 60 * minutes
        self.state: dict[str, Any] = {"format": JSON_FORMAT, "workload": workload, "grid": {}}
        if path.exists():
            self.state = json.loads(path.read_text())
            if (self.state.get("format"), self.state.get("workload")) != (JSON_FORMAT, workload):
                raise click.UsageError(f"{path} is of something else; name another --state")
        target = target_of_workload(workload)
        self.step, self.model = target.step, target.model
        self.config = offload.Config(device="cpu")
        self.runner = Runner(self.step, self.model, self.config, HostStopwatch(), repeats)
        if "plain_bytes" not in self.state:
            plain = self.runner.plain()
            self.state["plain_bytes"] = plain.peak_live_bytes
            self.state["limit_bytes"] = int(share * plain.peak_live_bytes)
            self.state["profile"] = machine_profile(self.config, refresh=True).to_dict()
            self.save()
        else:
            self.step()

    @property
    def in_time(self) -> bool:
        """Whether there is time for more."""
        return time.monotonic() < self.until

    def save(self) -> None:
        """Keep what was measured."""
        self.path.write_text(json.dumps(self.state, indent=1))

    def settings(self) -> list[Setting]:
        """The grid."""
        kept = [round(self.state["plain_bytes"] * share / MIB) * MIB for share in KEPT_SHARES]
        io = (self.config.io_threads, self.config.io_block_bytes)
        return [Setting(*s, *io) for s in itertools.product(LEAST, WINDOWS, PREFETCHES, kept)]

    def try_everything(self, console: Console) -> bool:
        """Measure what is missing of the grid; False if there was no time for all."""
        missing = [s for s in self.settings() if _key(s) not in self.state["grid"]]
        with Progress(console=console, transient=True) as progress:
            for setting in progress.track(missing, description="trying everything"):
                if not self.in_time:
                    return False
                measured = self.runner.offloaded(setting)
                self.state["grid"][_key(setting)] = {
                    "ratio": measured.ratio, "live_bytes": measured.peak_live_bytes,
                }  # fmt: skip
                self.save()
        return True

    def best_of_grid(self) -> Setting | None:
        """The fastest setting that keeps to the limit."""
        grid, limit = self.state["grid"], self.state["limit_bytes"]
        fitting = [s for s in self.settings() if grid[_key(s)]["live_bytes"] <= limit]
        return min(fitting, key=lambda s: grid[_key(s)]["ratio"], default=None)

    def tune(self) -> None:
        """Let the tuner choose from the same grid."""
        started = time.monotonic()
        settings = self.settings()
        found = offload.tune(
            self.step, config=self.config, max_live_bytes=self.state["limit_bytes"],
            settings=settings, max_trials=len(settings) // 5, repeats=2,
            profile=MachineProfile.from_dict(self.state["profile"]),
        )  # fmt: skip
        self.state["tuning"] = {"seconds": time.monotonic() - started, **found.to_dict()}
        self.save()

    def run_off(self, chosen: Setting, best: Setting, rounds: int) -> None:
        """Plain, chosen and best in turn."""
        kinds = {"plain": None, "chosen": chosen, "best": best}
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        sessions = {
            kind: Session(attrs.evolve(self.config, **s.options()))
            for kind, s in kinds.items()
            if s
        }
        for number in range(rounds + 1):
            for kind in kinds:
                started = time.perf_counter()
                if kind in sessions:
                    with sessions[kind].step():
                        self.step()
                else:
                    self.step()
                if number:  # the first lets each session learn
                    seconds[kind].append(time.perf_counter() - started)
        for session in sessions.values():
            session.close()
        self.state["run_off"] = seconds
        self.save()


def _key(setting: Setting) -> str:
    return json.dumps(asdict(setting))


def show(bench: Bench, best: Setting, chosen: Setting, console: Console) -> float:
    """Print everything; returns the ratio of the chosen setting's time to the best's."""
    state = bench.state
    tuning, grid = state["tuning"], state["grid"]
    seconds = state["run_off"]
    ratios = [c / b for c, b in zip(seconds["chosen"], seconds["best"], strict=True)]
    table = Table(title=f"{state['workload']}: in turn, {len(ratios)} rounds")
    for heading in ("", "median s", "range", "to plain", "alive", "setting"):
        table.add_column(heading, justify="right")
    plain = statistics.median(seconds["plain"])
    for kind, setting in (("plain", None), ("chosen", chosen), ("best", best)):
        spread = Spread.of(seconds[kind])
        live = grid[_key(setting)]["live_bytes"] if setting else state["plain_bytes"]
        table.add_row(
            kind, f"{spread.median:.3f}", f"{spread.low:.3f}-{spread.high:.3f}",
            f"{spread.median / plain:.3f}", format_bytes(live), _words(setting),
        )  # fmt: skip
    console.print(table)
    errors = [
        abs(t["predicted_ratio"] / t["ratio"] - 1) for t in tuning["trials"]
    ]  # fmt: skip
    fitting = [g["ratio"] for g in grid.values() if g["live_bytes"] <= state["limit_bytes"]]
    ratio = statistics.median(ratios)
    console.print(
        f"limit {format_bytes(state['limit_bytes'])} of {format_bytes(state['plain_bytes'])}; grid "
        f"of {len(grid)} settings, {len(fitting)} within it, {min(fitting):.3f} to "
        f"{max(fitting):.3f} of plain's time; tuning took {len(tuning['trials'])} trials and "
        f"{tuning['seconds']:.0f} s, its predictions were off by {max(errors, default=0):.1%} at "
        f"most; its choice takes {ratio:.3f} of the best's time (median of rounds)"
    )
    return ratio


def _words(setting: Setting | None) -> str:
    if setting is None:
        return ""
    names = ("min_offload_bytes", "window_bytes", "prefetch_bytes", "keep_last_bytes")
    return " / ".join(format_bytes(getattr(setting, name)) for name in names)


@click.command()
@click.argument("workload", type=click.Choice(list(PRESETS)))
@click.option("--state", type=click.Path(path_type=Path), required=True, help="What was measured.")
@click.option("--minutes", type=float, default=60, show_default=True, help="Then stop for now.")
@click.option("--share", type=float, default=0.25, show_default=True, help="Limit, of plain's.")
@click.option(
    "--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Steps of a trial."
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def main(
    workload: str,
    state: Path,
    minutes: float,
    share: float,
    repeats: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Compare tuning with trying everything."""
    console = Console(stderr=as_json, highlight=False)
    bench = Bench(state, workload, minutes, share, repeats)
    if not bench.try_everything(console):
        console.print(f"{len(bench.state['grid'])} of {len(bench.settings())} settings so far")
        sys.exit(MORE_TO_MEASURE)
    best = bench.best_of_grid()
    if best is None:
        raise click.ClickException(
            "no setting of the grid keeps to the limit; give another --share"
        )
    if "tuning" not in bench.state:
        if not bench.in_time:
            sys.exit(MORE_TO_MEASURE)
        bench.tune()
    if bench.state["tuning"]["choice"] != "offload":
        raise click.ClickException(f"tuning refused: {bench.state['tuning']['why']}")
    options = bench.state["tuning"]["options"]
    chosen = Setting(**{name: options[name] for name in asdict(best)})
    if "run_off" not in bench.state:
        if not bench.in_time:
            sys.exit(MORE_TO_MEASURE)
        bench.run_off(chosen, best, rounds)
    ratio = show(bench, best, chosen, console)
    if as_json:
        machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "torch": torch.__version__}
        print(json.dumps({**bench.state, "machine": machine, "chosen_to_best": ratio}, indent=1))
    sys.exit(0 if ratio <= MAX_RATIO else 1)


if __name__ == "__main__":
    main()
