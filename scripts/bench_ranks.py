"""How the processes of a node share one disk, by the number of I/O threads each of them has.

Every rank has a scratch file and an engine of its own, as in training, and keeps 32 MiB of writes
or 48 MiB of reads on their way; all begin together. Printed for each number of ranks and threads:
what they move together, the slowest rank's share of a fair one, the processor time per GB, and how
long an urgent read takes behind writes.

    python scripts/bench_ranks.py --ranks 1,2,4 --threads 1,2,4
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections import deque
from multiprocessing.synchronize import Barrier
from typing import Any, NamedTuple

import click
from listed import numbers
from rich.console import Console
from rich.table import Table

from offload import _native

BLOCK_BYTES = 8 << 20
WRITES_IN_FLIGHT, READS_IN_FLIGHT = 4, 6
START_METHOD = "fork"  # nothing runs yet when the ranks are made


class Share(NamedTuple):
    """What one rank saw."""

    write_seconds: float
    read_seconds: float
    cpu_ns: int
    urgent_ns: list[int]


def rank_main(
    directory: str, threads: int, nbytes: int, barrier: Barrier, results: Any, number: int
) -> None:
    file = _native.File(directory)
    file.reserve(nbytes)
    queue = _native.Queue(file, threads=threads, block_bytes=BLOCK_BYTES, capacity=64)
    arena = _native.Arena((WRITES_IN_FLIGHT + READS_IN_FLIGHT + 2) * BLOCK_BYTES, prefault=False)
    offsets = range(0, nbytes, BLOCK_BYTES)

    def moved(write: bool, in_flight: int) -> float:
        barrier.wait()
        started = time.perf_counter()
        requests: deque[_native.Request] = deque()
        for offset in offsets:
            if len(requests) == in_flight:
                requests.popleft().wait()
            slot = arena.allocate(BLOCK_BYTES)
            assert slot is not None
            requests.append(queue.write(slot, offset) if write else queue.read(slot, offset))
            del slot
        while requests:
            requests.popleft().wait()
        return time.perf_counter() - started

    moved(True, WRITES_IN_FLIGHT)  # a file is slower while it grows
    before_ns = queue.stats()["cpu_ns"]
    write_seconds = moved(True, WRITES_IN_FLIGHT)
    read_seconds = moved(False, READS_IN_FLIGHT)
    cpu_ns = queue.stats()["cpu_ns"] - before_ns
    results.put((number, Share(write_seconds, read_seconds, cpu_ns, urgent(queue, arena, barrier))))
    queue.close()


def urgent(queue: _native.Queue, arena: _native.Arena, barrier: Barrier) -> list[int]:
    """Times of urgent reads while writes wait."""
    barrier.wait()
    writes: deque[_native.Request] = deque()
    times_ns = []
    for i in range(24):
        while len(writes) < WRITES_IN_FLIGHT:
            slot = arena.allocate(BLOCK_BYTES)
            assert slot is not None
            writes.append(queue.write(slot, (4 + len(writes) + i % 4) * BLOCK_BYTES))
            del slot
        target = arena.allocate(BLOCK_BYTES)
        assert target is not None
        started_ns = time.perf_counter_ns()
        queue.read(target, 0, urgent=True).wait()
        times_ns.append(time.perf_counter_ns() - started_ns)
        writes.popleft().wait()
    while writes:
        writes.popleft().wait()
    return times_ns


def measure(directory: str, ranks: int, threads: int, nbytes: int) -> dict[str, float]:
    context = multiprocessing.get_context(START_METHOD)
    barrier, results = context.Barrier(ranks), context.Queue()
    processes = [
        context.Process(
            target=rank_main, args=(directory, threads, nbytes, barrier, results, number)
        )
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    shares = [results.get(timeout=300)[1] for _ in processes]
    for process in processes:
        process.join()
    writes = [s.write_seconds for s in shares]
    reads = [s.read_seconds for s in shares]
    return {
        "ranks": ranks,
        "threads": threads,
        "write_gb_per_s": ranks * nbytes / max(writes) / 1e9,
        "read_gb_per_s": ranks * nbytes / max(reads) / 1e9,
        "write_fairness": min(writes) / max(writes),
        "read_fairness": min(reads) / max(reads),
        "cpu_seconds_per_gb": sum(s.cpu_ns for s in shares) / (2 * ranks * nbytes),
        "urgent_read_ms": statistics.median(t for s in shares for t in s.urgent_ns) / 1e6,
    }


@click.command()
@click.option("--ranks", default="1,2,4", show_default=True, callback=numbers)
@click.option("--threads", default="1,2,4", show_default=True, callback=numbers)
@click.option("--mib", default=512, show_default=True, help="Of each rank, per direction.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--disk-dir", default=tempfile.gettempdir(), show_default=True)
@click.option("--json", "as_json", is_flag=True)
def main(
    ranks: list[int], threads: list[int], mib: int, rounds: int, disk_dir: str, as_json: bool
) -> None:
    """Measure; medians of the rounds, in which all combinations take turns."""
    found: dict[tuple[int, int], list[dict[str, float]]] = {}
    for _ in range(rounds):
        for n in ranks:
            for t in threads:
                found.setdefault((n, t), []).append(measure(disk_dir, n, t, mib << 20))
    rows = [
        {name: statistics.median(r[name] for r in results) for name in results[0]}
        for results in found.values()
    ]
    if as_json:
        print(json.dumps({"format": 1, "mib": mib, "rounds": rounds, "rows": rows}))
        return
    table = Table(title=f"{mib} MiB a rank and direction, medians of {rounds}")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.0f}" if v == int(v) else f"{v:.3f}" for v in row.values()))
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
