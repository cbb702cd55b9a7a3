"""The runtime on the simulated accelerator: four ways to set up its tiers, and what tests need."""

import contextlib
from collections.abc import Iterator
from typing import Any

import simdev
import torch
from torch import Tensor, nn

import offload
from offload.engines import Engine, Request, Slot, native_is_built
from offload.engines.aio import AioEngine
from offload.lanes.pinning import PINNERS
from tests.conftest import wait_until
from tests.doubles import WrappedEngine

# All in host memory, all on the disk, a host memory that holds only a part, and small storages in
# bundles there.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "host": {},
    "disk": {"policy": lambda tensor: offload.Placement.DISK},
    "host+disk": {"host_budget": 64 << 10},
    "bundles+disk": {
        "bundle_bytes": 32 << 10,
        "window_bytes": 1 << 20,
        "prefetch_bytes": 1 << 20,
        "host_budget": 1 << 20,
    },
}
SINGLY = [name for name in CONFIGURATIONS if "bundles" not in name]  # each storage by itself
SMALL_WINDOWS = {"window_bytes": 32 << 10, "prefetch_bytes": 32 << 10}


class SimPinner:
    """Registers slabs with the simulated driver."""

    def pin(self, address: int, nbytes: int) -> None:
        simdev.host_register(address, nbytes)

    def unpin(self, address: int) -> None:
        torch.accelerator.synchronize()
        simdev.host_unregister(address)


PINNERS["sim"] = SimPinner


class WatchedEngine(WrappedEngine):
    """Tells the race detector what the host does to slots when it reads and writes the disk."""

    def write(self, slot: Slot, offset: int) -> Request:
        simdev.host_access(slot.address, slot.nbytes, is_write=False)
        return super().write(slot, offset)

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        simdev.host_access(slot.address, slot.nbytes, is_write=True)
        return super().read(slot, offset, urgent=urgent, checksum=checksum)


def open_engine(directory: str) -> Engine:
    """A watched engine."""
    if native_is_built():
        from offload.engines.native import NativeEngine

        return WatchedEngine(NativeEngine(directory, threads=2, block_bytes=1 << 20))
    return WatchedEngine(AioEngine(directory, threads=2, block_bytes=1 << 20))


@contextlib.contextmanager
def session_on_sim(directory: str, **options: Any) -> Iterator[offload.Session]:
    """A session that offloads everything at once through small windows, closed and checked: what it
    pinned is unpinned, and no race was found.
    """
    options = {
        "device": "sim", "disk_dir": directory, "min_offload_bytes": 0, "keep_last_bytes": 0,
        **SMALL_WINDOWS, "_engine": open_engine(directory), **options,
    }  # fmt: skip
    with offload.Session(**options) as session:
        yield session
    del session
    torch.accelerator.synchronize()
    # autograd's thread may let go of its last graph a moment later
    wait_until(lambda: simdev.stats().pinned.current_bytes == 0)
    assert simdev.stats().pinned.current_bytes == 0


def train(model: nn.Module, device: str, step: Any, steps: int = 2) -> list[Tensor]:
    """All gradients and losses of a few steps of AdamW over batches of (4, 16, 64), on the CPU."""
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(steps):
        x = torch.randn(4, 16, 64, generator=generator).to(device)
        with step():
            loss = model(x).square().mean()
            loss.backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        found.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return [t.cpu() for t in found]
