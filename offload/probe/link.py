"""The accelerator: what NVML says of it, and the measured rates of its link and of its arithmetic.

Rates are taken between events on the device's streams, from and to host memory that is pinned the
way a session pins it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol, cast

import pynvml
import torch

from offload.config import Config
from offload.engines import Engine, open_engine
from offload.lanes import pinner_for
from offload.system.machine import indexed
from offload.units import MIB

__all__ = [
    "AcceleratorFacts",
    "LinkRates",
    "accelerator_facts",
    "measure_flops",
    "measure_link",
]

_SMALL_BYTES = 64 << 10
_LONG_PRODUCT_SECONDS = 200e-6
_PRODUCTS = 10  # that are timed together on an accelerator
_FLOPS_SECONDS = 0.2  # of products on the CPU


class Nvml(Protocol):
    """The part of ``pynvml`` that is used."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...  # noqa: N802
    def nvmlShutdown(self) -> None: ...  # noqa: N802
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...  # noqa: N802
    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: object) -> int: ...  # noqa: N802
    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: object) -> int: ...  # noqa: N802
    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: object) -> int: ...  # noqa: N802
    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: object) -> int: ...  # noqa: N802


@dataclass(frozen=True)
class PcieLink:
    """A PCIe link now, and the best that device and slot could do together."""

    generation: int
    width: int
    max_generation: int
    max_width: int

    @property
    def bytes_per_s(self) -> float:
        """What it carries in each direction, after its line coding."""
        return _pcie_bytes_per_s(self.generation, self.width)

    @property
    def max_bytes_per_s(self) -> float:
        """The same at its best."""
        return _pcie_bytes_per_s(self.max_generation, self.max_width)


def _pcie_bytes_per_s(generation: int, width: int) -> float:
    """Per lane, generations 1 and 2 carry 2.5 and 5 Gbit/s in 8b/10b, 3 to 5 carry 8 Gbit/s and
    its doubles in 128b/130b, 6 and later twice as much in flits.

    Example:
        >>> round(_pcie_bytes_per_s(4, 16) / 1e9, 1)
        31.5
    """
    if generation <= 2:
        return 2.5e9 * generation * 0.8 / 8 * width
    return float(8e9 * 2 ** (generation - 3) * (128 / 130 if generation < 6 else 1) / 8 * width)


@dataclass(frozen=True)
class AcceleratorFacts:
    """A device as torch names it; ``pcie`` is None where NVML does not tell."""

    device: str
    name: str
    memory_bytes: int | None
    pcie: PcieLink | None
    why_no_pcie: str = ""


def accelerator_facts(
    device: torch.device, nvml: Nvml | ModuleType = pynvml
) -> AcceleratorFacts | None:
    """What is known of ``device``; None for the CPU.

    The link is asked for as it is now: an idle device may lower its generation, so measure first.
    """
    if device.type == "cpu":
        return None
    device = indexed(device)
    index = device.index
    properties = None
    with contextlib.suppress(AttributeError, RuntimeError):
        properties = torch.get_device_module(device).get_device_properties(index)
    memory_bytes = None
    with contextlib.suppress(AttributeError, RuntimeError):
        memory_bytes = int(torch.accelerator.get_memory_info(index)[1])
    uuid = getattr(properties, "uuid", None)
    pcie, why = _pcie(cast(Nvml, nvml), str(uuid)) if uuid is not None else (None, "no UUID")
    name = str(getattr(properties, "name", device.type))
    return AcceleratorFacts(str(device), name, memory_bytes, pcie, why)


def _pcie(nvml: Nvml, uuid: str) -> tuple[PcieLink | None, str]:
    try:
        nvml.nvmlInit()
        try:
            handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            link = PcieLink(
                nvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
                nvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
                nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
                nvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            )
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return None, str(error)
    return link, ""


@dataclass(frozen=True)
class LinkRates:
    """Of copies between a device and host memory; ``out`` is from the device.

    Attributes:
        pinned: whether the driver let the memory be pinned. If not, copies block the host.
        latency_seconds: what a copy takes beyond its bytes.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    duplex_out_bytes_per_s: float
    duplex_in_bytes_per_s: float
    latency_seconds: float
    pinned: bool


class _Ends:
    """Host and device memory of one size, with the two streams of a session."""

    def __init__(self, engine: Engine, device: torch.device, nbytes: int) -> None:
        self._slots = [engine.arena(nbytes).allocate(nbytes) for _ in range(2)]
        self.hosts = [
            torch.empty(0, dtype=torch.uint8).set_(engine.alias(slot))
            for slot in self._slots
            if slot is not None
        ]
        self.devices = [torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2)]
        self.out, self.into = torch.Stream(device=device), torch.Stream(device=device)
        torch.accelerator.synchronize()

    def time(self, out: int, into: int, nbytes: int) -> tuple[float, float]:
        """Seconds that ``out`` copies out and ``into`` copies in take, at the same time."""
        marks = []
        for stream, count, is_out in ((self.out, out, True), (self.into, into, False)):
            start, end = (torch.Event(stream.device, enable_timing=True) for _ in range(2))
            marks.append((stream, count, is_out, start, end))
            start.record(stream)
        for i in range(max(out, into)):
            for stream, count, is_out, _, _ in marks:
                if i < count:
                    side = 0 if is_out else 1
                    ends = (self.hosts[side][:nbytes], self.devices[side][:nbytes])
                    target, source = ends if is_out else ends[::-1]
                    with stream:
                        target.copy_(source, non_blocking=True)
        for stream, _, _, _, end in marks:
            end.record(stream)
        torch.accelerator.synchronize()
        seconds = [start.elapsed_time(end) / 1e3 for _, _, _, start, end in marks]
        return seconds[0], seconds[1]


def measure_link(
    device: torch.device,
    directory: str,
    *,
    copy_bytes: int = 32 * MIB,
    copies: int = 16,
) -> LinkRates:
    """The rates of the link to ``device``.

    Args:
        device: an accelerator.
        directory: where the engine, which gives the host memory, puts its scratch file.
        copy_bytes: size of one copy.
        copies: how many in each direction.
    """
    engine = open_engine(Config(device="cpu", disk_dir=directory))
    pinner = pinner_for(device.type)
    ends = _Ends(engine, device, copy_bytes)
    pinned = []
    try:
        for host in ends.hosts:
            with contextlib.suppress(RuntimeError):
                if pinner is not None:
                    pinner.pin(host.data_ptr(), copy_bytes)
                    pinned.append(host.data_ptr())
        ends.time(1, 1, copy_bytes)  # the first copies set things up
        moved_bytes = copies * copy_bytes
        small_seconds = ends.time(copies, 0, _SMALL_BYTES)[0] / copies
        out_seconds = ends.time(copies, 0, copy_bytes)[0]
        in_seconds = ends.time(0, copies, copy_bytes)[1]
        duplex_out, duplex_in = ends.time(copies, copies, copy_bytes)
    finally:
        torch.accelerator.synchronize()
        for address in pinned:
            if pinner is not None:
                pinner.unpin(address)
        engine.close()
    # Two sizes give both parts of a copy's time: what each byte takes, and what each copy does.
    per_byte = (out_seconds / copies - small_seconds) / (copy_bytes - _SMALL_BYTES)
    latency_seconds = max(0.0, small_seconds - _SMALL_BYTES * per_byte)
    spent = copies * latency_seconds

    def rate(seconds: float) -> float:
        return moved_bytes / max(seconds - spent, 1e-9)

    return LinkRates(
        rate(out_seconds), rate(in_seconds), rate(duplex_out), rate(duplex_in), latency_seconds,
        len(pinned) == len(ends.hosts),
    )  # fmt: skip


def measure_flops(device: torch.device) -> float:
    """Floating-point operations per second of square matrix products, in float32 on the CPU and
    bfloat16 elsewhere, where the products grow until they take a fast device long enough.
    """
    if device.type == "cpu":
        return _flops_on_cpu(1024)
    flops_per_s = 0.0
    for size in (256, 512, 1024, 2048, 4096):
        taken = _product_seconds(device, size)
        flops_per_s = 2 * size**3 / taken
        if taken >= _LONG_PRODUCT_SECONDS:
            break
    return flops_per_s


def _flops_on_cpu(size: int) -> float:
    a = torch.ones(size, size)
    b = a @ a  # warm
    count, elapsed = 0, 0.0
    started = time.perf_counter()
    while count < 3 or elapsed < _FLOPS_SECONDS:
        torch.mm(a, a, out=b)
        count, elapsed = count + 1, time.perf_counter() - started
    return count * 2 * size**3 / elapsed


def _product_seconds(device: torch.device, size: int) -> float:
    """What one product of several takes an accelerator."""
    a = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    b = a @ a  # warm
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize()
    start.record()
    for _ in range(_PRODUCTS):
        torch.mm(a, a, out=b)
    end.record()
    torch.accelerator.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / _PRODUCTS
