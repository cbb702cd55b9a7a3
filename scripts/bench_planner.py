"""The evidence for the planner: its search beside the exact solver, its model beside a simulation.

    python scripts/bench_planner.py            # everything, about ten minutes on two cores
    python scripts/bench_planner.py --chains 20

Chains are random: times, bytes, boundaries, budgets and rates are drawn from wide ranges, with two
or three tiers. Nothing is trained; ``offload sweep`` compares predictions with measured steps.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).parents[1]))

from offload.planner.exact import solve_exact
from offload.planner.predict import predict
from offload.planner.solve import lower_bound, search
from tests.planner.chains import random_chain, transformer_chain
from tests.planner.simulation import simulate


@click.command(help=__doc__)
@click.option("--chains", default=200, show_default=True, help="Chains beside the exact solver.")
@click.option("--simulated", default=1000, show_default=True, help="Chains that are simulated.")
@click.option("--seconds", default=20.0, show_default=True, help="Limit of the exact solver.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of lines.")
def main(chains: int, simulated: int, seconds: float, as_json: bool) -> None:
    found = {
        "format": 1,
        "search": beside_exact(chains, seconds),
        "simulation": beside_simulation(simulated),
        "scaling": scaling(),
    }
    if as_json:
        print(json.dumps(found))
        return
    for name, figures in found.items():
        if isinstance(figures, dict):
            print(name)
            for key, value in figures.items():
                print(
                    f"    {key}: {value:.4f}" if isinstance(value, float) else f"    {key}: {value}"
                )


def beside_exact(count: int, limit_seconds: float) -> dict[str, float]:
    """How much slower the search's plans are than the best that is known.

    A chain that the exact solver does not finish in time counts with the better of its own plan
    and its own bound: ``worst`` is then against what it proved possible at best.
    """
    rng = random.Random(2026)
    excess, searched, exact_seconds, bound_gap, unproven, infeasible = [], [], [], [], 0, 0
    for number in range(count):
        chain = random_chain(rng, rng.choice((8, 12, 16, 24, 32, 48, 64)))
        started = time.perf_counter()
        _, ours = search(chain)
        searched.append(time.perf_counter() - started)
        started = time.perf_counter()
        exact = solve_exact(chain, seconds=limit_seconds, gap=1e-3)
        exact_seconds.append(time.perf_counter() - started)
        if exact.choice is None:
            infeasible += exact.proven and ours == float("inf")
            continue
        theirs = predict(chain, exact.choice).seconds
        unproven += not exact.proven
        excess.append(ours / theirs - 1)
        bound_gap.append(1 - lower_bound(chain) / min(ours, theirs))
        if sys.stderr.isatty():
            print(f"\r{number + 1}/{count}", end="", file=sys.stderr)
    return {
        "chains": len(excess),
        "infeasible for both": infeasible,
        "not finished by the exact solver": unproven,
        "within 1 %": sum(e <= 0.01 for e in excess),
        "slower than exact, median": statistics.median(excess),
        "slower than exact, worst": max(excess),
        "above the bound, median": statistics.median(bound_gap),
        "above the bound, worst": max(bound_gap),
        "search seconds, worst": max(searched),
        "exact seconds, median": statistics.median(exact_seconds),
    }


def beside_simulation(count: int) -> dict[str, float]:
    """What an event simulation of the runtime says of the plans."""
    rng = random.Random(7)
    ratios, over, stuck, peaks = [], 0, 0, []
    for _ in range(count):
        chain = random_chain(rng, rng.choice((4, 6, 8, 12)))
        choice, seconds = search(chain)
        if seconds == float("inf"):
            continue
        run = simulate(chain, choice)
        stuck += run.stuck
        over += run.over_budget
        if not run.stuck:
            ratios.append(run.seconds / seconds)
            peaks.append(run.peak_device_bytes / predict(chain, choice).peak_device_bytes)
    ratios.sort()
    return {
        "plans": len(ratios),
        "over a budget": over,
        "stuck": stuck,
        "simulated to predicted seconds, median": statistics.median(ratios),
        "simulated to predicted seconds, 95 %": ratios[int(0.95 * len(ratios))],
        "simulated to predicted seconds, worst": ratios[-1],
        "simulated to predicted peak, median": statistics.median(peaks),
    }


def scaling() -> dict[str, float]:
    """Seconds of the search for transformers of so many layers, at 30 % of their activations."""
    found = {}
    for layers in (16, 32, 64, 128):
        chain = transformer_chain(layers, fraction=0.3)
        started = time.perf_counter()
        search(chain)
        found[f"{layers} segments, seconds"] = time.perf_counter() - started
    return found


if __name__ == "__main__":
    main()
