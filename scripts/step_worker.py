"""One mode of bench_step.py in a process of its own: prints one JSON object about its steps.

A mode is a way to treat saved activations. Order of things, the same for every mode: build the
model; allocate its gradients; mark the memory; open the mode; one step to warm up, or as many as a
plan takes to settle; the timed steps; one more step under a meter of live activations, not timed.

Resident memory is told in two ways. ``rss_growth_bytes``: how far it rises within a step, above
what it was just before that step, which includes what the C library's heap kept of earlier steps.
``rss_over_model_bytes``: how far it has been, warm-up included, above the model with its
gradients: activations, temporaries, staging memory and what fragmentation of the heap wastes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from offload import selective
from offload.measure import activation_meter, fingerprint, mark_memory
from offload.planner.auto import Auto
from offload.session import Session
from offload.system.pool import use_pool
from offload.tensors.live import LiveBytesMeter, is_parameter_like
from offload.workloads import Batch, TrainableModel, Workload, preset

MODES = {
    "plain": "nothing",
    "plain+pool": "nothing, in the memory that offload.Session gives torch",
    "checkpoint": "torch.utils.checkpoint around every block",
    "save_on_cpu": "torch.autograd.graph.save_on_cpu",
    "torch_save": "a hook that calls torch.save and torch.load above 1 MiB",
    "offload": "offload.Session",
    "plain+disk": "plain+pool beside a process that writes and reads as many bytes as offload did",
    "offload+checkpoint": "offload.Session over torch.utils.checkpoint",
    "offload+selective": "offload.Session, and offload.selective around every block",
    "offload+plan": "offload.Session and a plan, for --option device_budget=... or half the memory",
}
FILE_THRESHOLD_BYTES = 1 << 20
MOST_WARM_UP_STEPS = 24
TRAFFIC = Path(__file__).with_name("disk_traffic.py")


@dataclass(frozen=True)
class Task:
    """What to measure; ``session`` holds options of the session, ``disk_dir`` among them."""

    mode: str
    workload: str
    steps: int
    seed: int
    threads: int | None = None
    session: dict[str, Any] = field(default_factory=dict)
    traffic: tuple[float, float] | None = None  # bytes a second to write and to read, meanwhile


class SavedFile:
    """A tensor in a file that goes when the object does."""

    def __init__(self, tensor: Tensor, directory: str) -> None:
        with tempfile.NamedTemporaryFile(dir=directory, suffix=".pt", delete=False) as file:
            torch.save(tensor, file)
        self.path = Path(file.name)

    def load(self) -> Tensor:
        """The tensor, read anew."""
        tensor: Tensor = torch.load(self.path, weights_only=True)
        return tensor

    def __del__(self) -> None:
        self.path.unlink(missing_ok=True)


class FileHooks:
    """The hook of torch's tutorial on saved tensors: one synchronous file for every large tensor.

    Parameters stay, as in any hook worth comparing with.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self.written_bytes = 0
        self.read_bytes = 0

    def hooks(self) -> saved_tensors_hooks:
        """A fresh context manager."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> Tensor | SavedFile:
        if tensor.nbytes < FILE_THRESHOLD_BYTES or is_parameter_like(tensor):
            return tensor.detach()
        saved = SavedFile(tensor, self._directory)
        self.written_bytes += saved.path.stat().st_size
        return saved

    def _unpack(self, packed: Tensor | SavedFile) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.read_bytes += packed.path.stat().st_size
        return packed.load()


@contextmanager
def traffic(write_rate: float, read_rate: float, directory: str) -> Iterator[None]:
    """A process of its own moves so many bytes a second, evenly, until the context ends."""
    arguments = [str(TRAFFIC), str(write_rate), str(read_rate), directory]
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE) as process:
        try:
            if process.stdout is None or not process.stdout.readline():  # it is under way
                raise OSError("the process that moves bytes beside the training did not start")
            yield
            if process.poll() is not None:
                raise OSError("the process that moves bytes beside the training has ended early")
        finally:
            process.kill()


class Runner:
    """Runs the steps of one mode on one model."""

    def __init__(self, task: Task, workload: Workload, model: TrainableModel) -> None:
        self.workload = workload
        self.model = model
        self.checkpoints = "checkpoint" in task.mode or "selective" in task.mode
        self.options = {"context_fn": selective()} if "selective" in task.mode else {}
        self.session: Session | None = None
        if task.mode in ("plain+pool", "plain+disk"):
            use_pool("pool")
        self.files: FileHooks | None = None
        self._open: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.auto: Auto | None = None
        if task.mode == "offload+plan":
            self.session = Session(**{"device_budget": "auto", **task.session})
            self.auto = self.session.apply(model, "auto").auto
        elif task.mode.startswith("offload"):
            self.session = Session(**task.session)
        elif task.mode == "torch_save":
            self.files = FileHooks(task.session.get("disk_dir") or tempfile.gettempdir())
            self._open = self.files.hooks
        elif task.mode == "save_on_cpu":
            self._open = save_on_cpu
        if self.session is not None:
            self._open = self.session.step

    def warm_up(self, batch: Batch) -> None:
        """Steps that are not timed."""
        for _ in range(MOST_WARM_UP_STEPS):
            self.step(batch)
            if self.auto is None or self.auto.settled:
                return

    def step(self, batch: Batch, meter: LiveBytesMeter | None = None) -> tuple[float, float]:
        """Loss and seconds of one forward and backward; gradients start at zero."""
        self.model.zero_grad(set_to_none=False)
        if self.checkpoints:
            self.model.wrap_block = partial(_checkpointed, meter, self.options)
        started = time.perf_counter()
        with self._open():
            with meter or nullcontext():
                loss = self.workload.step(self.model, batch)
            torch.autograd.backward(loss)
        seconds = time.perf_counter() - started
        return loss.item(), seconds

    def moved(self) -> dict[str, Any]:
        """What went to the disk and back so far, and the time spent waiting for it."""
        if self.session is not None:
            return self.session.report().to_dict()
        if self.files is not None:
            return {"written_bytes": self.files.written_bytes, "read_bytes": self.files.read_bytes}
        return {}


def _checkpointed(
    meter: LiveBytesMeter | None, options: dict[str, Any], block: nn.Module
) -> Callable[..., Tensor]:
    if meter is None:
        return partial(checkpoint, block, use_reentrant=False, **options)

    def run(*inputs: Tensor) -> Tensor:
        with meter:  # inside the region: only here are recomputed saves to be seen
            output: Tensor = block(*inputs)
            return output

    return partial(checkpoint, run, use_reentrant=False, **options)


def measure(task: Task) -> dict[str, Any]:
    """The figures of one mode; times in seconds, sizes in bytes, one entry per timed step."""
    if task.threads is not None:
        torch.set_num_threads(task.threads)
    workload = preset(task.workload)
    model = workload.build(task.seed)
    warmup, *batches = workload.batches(task.steps + 2, task.seed)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    base = mark_memory()
    runner = Runner(task, workload, model)
    with ExitStack() as stack:
        if runner.session is not None:
            stack.enter_context(runner.session)
        if task.traffic is not None:
            stack.enter_context(traffic(*task.traffic, task.session["disk_dir"]))
        runner.warm_up(warmup)
        over_model_bytes = base.peak_growth_bytes()
        before = runner.moved()
        seconds, faults, growths, losses, gradients = [], [], [], [], []
        for batch in batches[:-1]:
            mark = mark_memory(trim=False)
            loss, duration = runner.step(batch)
            faults.append(mark.faults_since())
            growths.append(mark.peak_growth_bytes())
            seconds.append(duration)
            losses.append(loss.hex())
            gradients.append(_gradients(model))
            peak_bytes = mark.rss_bytes + growths[-1]
            over_model_bytes = max(over_model_bytes, peak_bytes - base.rss_bytes)
        after = runner.moved()
        meter = activation_meter(model, runner.session, inputs=batches[-1])
        loss, _ = runner.step(batches[-1], meter)
        losses.append(loss.hex())
        gradients.append(_gradients(model))
    return {
        "seconds": seconds,
        "minor_faults": faults,
        "losses": losses,
        "gradients": gradients,
        "rss_growth_bytes": growths,
        "rss_over_model_bytes": over_model_bytes,
        "model_rss_bytes": base.rss_bytes,
        "rss_peaks_are_exact": base.exact,
        "peak_live_bytes": meter.peak_bytes,
        "alive_after_bytes": meter.alive_bytes,
        "per_step": _per_step(before, after, len(seconds)),
        "threads": torch.get_num_threads(),
    }


def _gradients(model: nn.Module) -> str:
    return fingerprint(p.grad for p in model.parameters() if p.grad is not None)


def _per_step(before: dict[str, Any], after: dict[str, Any], steps: int) -> dict[str, float]:
    keys = ("written_bytes", "read_bytes", "stall_seconds", "backpressure_seconds", "misses")
    moved = {k: (after[k] - before[k]) / steps for k in keys if k in after}
    if after.get("overlap") is not None:
        moved["overlap"] = after["overlap"]
    return moved


if __name__ == "__main__":
    print(json.dumps(measure(Task(**json.loads(sys.argv[1])))), flush=True)
