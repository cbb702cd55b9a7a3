"""Ranks: real processes with a process group between them, started once and given many tasks.

A fork server that has imported torch makes them, so that a rank costs a fork and not an import.
"""

import multiprocessing
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    "hypothesis",
    "numpy",
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
]
TASK_SECONDS = 60  # for one task on all ranks; far more than any takes
GRACE_SECONDS = 5  # for the other ranks, once one has failed


class Ranks:
    """``world_size`` processes with a gloo process group.

    Args:
        world_size: how many.
        directory: where they meet.
    """

    def __init__(self, world_size: int, directory: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.world_size = world_size
        self._connections: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            arguments = (theirs, rank, world_size, str(directory / "meeting"))
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def run(self, task: Callable[..., Any], *args: Any) -> list[Any]:
        """What ``task(*args)`` returns on each rank, all of which run it at once.

        ``task`` is a function of a module. What it raises on any rank is raised here as text.
        """
        self.start(task, *args)
        return self.finish()

    def start(self, task: Callable[..., Any], *args: Any) -> None:
        """Begin what ``run`` does."""
        for connection in self._connections:
            connection.send((task, args))

    def finish(self, ranks: list[int] | None = None) -> list[Any]:
        """The results of ``start``, of some ranks or of all."""
        ranks = list(range(self.world_size)) if ranks is None else ranks
        waiting = {self._connections[r]: r for r in ranks}
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + TASK_SECONDS
        while waiting and time.monotonic() < deadline:
            for connection in wait(list(waiting), timeout=0.1):
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    fine, said = connection.recv()
                except EOFError:
                    fine, said = False, "the process has died"
                (results if fine else failures)[rank] = said
                if not fine:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        for rank in waiting.values():
            failures[rank] = "did not end"
        if failures:
            if waiting or "the process has died" in failures.values():
                self.close()
            raise AssertionError("\n".join(f"rank {r}: {why}" for r, why in failures.items()))
        return [results[rank] for rank in sorted(results)]

    def signal(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        os.kill(self.processes[rank].pid, number)

    @property
    def alive(self) -> bool:
        """Whether all ranks still serve."""
        return bool(self.processes) and all(p.is_alive() for p in self.processes)

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()  # a rank that serves ends by itself
        for process in self.processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._connections, self.processes = [], []


def _serve(connection: Connection, rank: int, world_size: int, meeting: str) -> None:
    """The life of a rank: form the group, then do one task after the other."""
    import torch
    import torch.distributed as dist

    variables = {"RANK": rank, "LOCAL_RANK": rank}
    variables |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in variables.items()}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TASK_SECONDS),
    )
    while True:
        try:
            task, args = connection.recv()
        except EOFError:
            break
        try:
            answer = (True, task(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)
    sys.stdout.flush()
    os._exit(0)  # without waiting for ranks that have died
