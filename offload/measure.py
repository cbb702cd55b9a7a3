"""Measuring a step in a process of its own: memory marks, meters, fingerprints, worker processes.

Memory and time of a step depend on what the process did before, so whatever is compared runs in
fresh processes. A worker prints one JSON object a line on its standard output; what goes wrong
there is told on its standard error and by its exit status.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from offload.config import Config
from offload.errors import OffloadError
from offload.session import Session
from offload.system.interrupts import interrupts_deferred
from offload.tensors.live import LiveBytesMeter

__all__ = [
    "MemoryMark",
    "Spread",
    "activation_meter",
    "expect_step",
    "fingerprint",
    "mark_memory",
    "session_options",
    "worker_messages",
]

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_RESET_PEAK_RSS = "5"  # see proc_pid_clear_refs(5)


def expect_step(step: object) -> None:
    """Raise ``TypeError`` if it cannot be called."""
    if not callable(step):
        raise TypeError(f"step is {step!r}; give a function that runs one forward and backward")


def fingerprint(tensors: Iterable[Tensor]) -> str:
    """A hash of dtypes, shapes and every bit of ``tensors``: equal only for the same bits.

    0.0 and -0.0 differ, as do NaNs with different payloads: ``torch.equal`` would not see either.

    Example:
        >>> import torch
        >>> a = torch.zeros(3)
        >>> fingerprint([a]) == fingerprint([a.clone()]), fingerprint([a]) == fingerprint([-a])
        (True, False)
    """
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous()
        if flat.numel():
            # The bytes where they are: .numpy() knows no bfloat16, and a copy would cost memory.
            view = (ctypes.c_char * flat.nbytes).from_address(flat.data_ptr())
            digest.update(view)
    return digest.hexdigest()


@dataclass(frozen=True)
class MemoryMark:
    """The process's memory at one moment, to compare a later one with.

    Attributes:
        rss_bytes: resident memory then.
        minor_faults: page faults without I/O since the process began.
        exact: whether the kernel let us restart its peak; otherwise a peak from before the mark
            hides a smaller one after it.
    """

    rss_bytes: int
    minor_faults: int
    exact: bool

    def peak_growth_bytes(self) -> int:
        """How far resident memory has been above ``rss_bytes`` at most since the mark."""
        return max(0, _status_bytes("VmHWM") - self.rss_bytes)

    def faults_since(self) -> int:
        """Minor page faults since the mark."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self.minor_faults


def mark_memory(*, trim: bool = True) -> MemoryMark:
    """Remember resident memory as it is now, and restart the kernel's record of its peak.

    Args:
        trim: first give back memory that was freed, but that the C library keeps for later: it
            would hide the growth that follows. Makes the next step slower, as it has to fault its
            memory in again.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others have none
    if trim and malloc_trim is not None:
        malloc_trim(0)
    try:
        _CLEAR_REFS.write_text(_RESET_PEAK_RSS)
        exact = True
    except OSError:
        exact = False  # not allowed in some containers
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return MemoryMark(_status_bytes("VmRSS"), faults, exact)


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def activation_meter(
    model: nn.Module | None,
    session: Session | None = None,
    inputs: Iterable[Tensor] = (),
    observer: Callable[[int], object] | None = None,
) -> LiveBytesMeter:
    """A meter of the activations of ``model``, to be entered inside ``session.step()``.

    Args:
        model: its parameters and buffers do not count; ``None``: it is not known.
        session: the session in use, whose staging memory counts as activations.
        inputs: what the caller holds anyway, a batch for instance; does not count either.
        observer: called with the bytes alive wherever they may just have changed.
    """
    model = model if model is not None else nn.Module()
    excluded = [*model.parameters(), *model.buffers(), *inputs]
    staged = None if session is None else partial(getattr, session, "held_bytes")
    return LiveBytesMeter(exclude=excluded, extra_bytes=staged, observer=observer)


def session_options(texts: Iterable[str], **named: object) -> dict[str, Any]:
    """Session options from command-line texts ``name=value``, checked as a session would.

    Args:
        texts: values are read as JSON where they are JSON (``2``, ``true``), else as they stand.
        **named: options that have a command-line option of their own; None is not given.

    Raises:
        TypeError, ValueError: an option that a session would refuse; the message says the fix.

    Example:
        >>> session_options(["window_bytes=32MiB", "io_threads=4"], engine=None)
        {'window_bytes': '32MiB', 'io_threads': 4}
    """
    options: dict[str, Any] = {k: v for k, v in named.items() if v is not None}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ValueError(f"{text!r} is no NAME=VALUE, as in window_bytes=32MiB")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    config = Config.of(options)
    if "disk_dir" in options:
        options["disk_dir"] = config.disk_dir  # wherever the target goes
    return options


@dataclass(frozen=True)
class Spread:
    """Median and range of repeated measurements.

    Example:
        >>> Spread.of([2.0, 1.0, 4.0])
        Spread(median=2.0, low=1.0, high=4.0, count=3)
    """

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of ``values``, of which there is at least one."""
        return cls(statistics.median(values), min(values), max(values), len(values))


def worker_messages(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run ``python *arguments`` in a fresh process and yield the JSON objects it prints.

    The worker ends when the iterator is exhausted or closed.

    Raises:
        OffloadError: it exited with another status than 0, or printed something else.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as errors:  # a full pipe would block it
        worker = None
        try:
            with interrupts_deferred():
                worker = subprocess.Popen(
                    [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
                )
            assert worker.stdout is not None
            for line in worker.stdout:
                yield _message(line)
            status = worker.wait()
        finally:
            if worker is not None:
                worker.kill()
                worker.communicate()
        errors.seek(0)
        told = errors.read().strip()
    if status:
        why = told.splitlines()[-1] if told else "it said nothing about why"
        how = (
            f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
        )
        raise OffloadError(f"a worker process {how}: {why}")


def _message(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except json.JSONDecodeError:
        message = None
    if not isinstance(message, dict):
        raise OffloadError(f"a worker process printed {line.strip()!r} where JSON was expected")
    return message
