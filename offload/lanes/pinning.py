"""Pinning: makes host memory that a device can copy to and from while the host goes on.

torch's own pinned memory comes in powers of two and stays in its cache; an arena has to be exact
and to end. So the arena's slabs are ordinary memory that is registered with the driver. There is no
call for this in torch that fits every accelerator: ``PINNERS`` holds one adapter for each kind.
Where there is none, copies are right and block the host.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import pynvml
import torch

from offload.system.machine import cpus_near_pci_device


class Pinner(Protocol):
    """Registers page-aligned memory of this process with a driver."""

    def pin(self, address: int, nbytes: int) -> None:
        """From now on a device may copy from and to it. Raises ``RuntimeError`` if refused."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``, once no device is copying any more."""


class _CudaPinner:
    """CUDA, and ROCm under the same names in torch."""

    _PORTABLE = 1  # for every device, not only the current one

    def pin(self, address: int, nbytes: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        # This is where the pages come into being, in the memory nearest to the processor that asks.
        with on_cpus(cpus_near(torch.device("cuda"))):
            code = runtime.cudaHostRegister(address, nbytes, self._PORTABLE)
        torch.cuda.check_error(int(code))

    def unpin(self, address: int) -> None:
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))


def cpus_near(device: torch.device) -> set[int]:
    """The processors next to a device; empty where that makes no difference or is not known.

    Memory that a thread on one of them fills first is the device's nearest, and threads that are
    started there stay there. Before the process has used its device, which one that will be is not
    known either, and to ask would begin to use one.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return set()
    index = device.index if device.index is not None else torch.cuda.current_device()
    properties: Any = torch.cuda.get_device_properties(index)
    try:
        address = (
            f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}"
            f":{properties.pci_device_id:02x}.0"
        )
    except AttributeError:  # an older torch
        return _cpus_by_nvml(index)
    return cpus_near_pci_device(address) or _cpus_by_nvml(index)


def _cpus_by_nvml(index: int) -> set[int]:
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        words = pynvml.nvmlDeviceGetCpuAffinity(handle, -(-(os.cpu_count() or 1) // 64))
    except (pynvml.NVMLError, AttributeError):  # no driver of this maker, or an older torch
        return set()
    return cpus_of(words)


def cpus_of(words: Iterable[int]) -> set[int]:
    """The set bits of a mask in words of 64.

    Example:
        >>> sorted(cpus_of([0b101, 0b1]))
        [0, 2, 64]
    """
    return {64 * i + bit for i, word in enumerate(words) for bit in range(64) if word >> bit & 1}


@contextlib.contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """Run this thread on those of ``cpus`` that it may use; on all of its own if there are none."""
    before = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if not cpus & before:
        yield
        return
    os.sched_setaffinity(0, cpus & before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


PINNERS: dict[str, Callable[[], Pinner]] = {"cuda": _CudaPinner}


def pinner_for(device_type: str) -> Pinner | None:
    """The adapter for a kind of device; ``None`` where there is none."""
    make = PINNERS.get(device_type)
    return make() if make is not None else None
