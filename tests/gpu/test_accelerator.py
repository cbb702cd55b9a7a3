"""On a real accelerator: the same bits, within the budgets, by the runtime's own order checker."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.workloads.llama import LlamaBlock, LlamaConfig


class Size(NamedTuple):
    """Of the model and its batch."""

    rows: int = 4
    length: int = 1024
    width: int = 512

    @property
    def stream_bytes(self) -> int:
        """Of the residual stream: the smallest of the large tensors."""
        return 4 * self.rows * self.length * self.width


SIZE = Size()
Step = Callable[[], contextlib.AbstractContextManager[Any]]


class Stack(nn.Module):
    """A few small Llama blocks, recomputed if asked for."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        width = SIZE.width
        config = LlamaConfig(width=width, heads=8, kv_heads=4, hidden=3 * width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(4))
        frequencies = 1e4 ** (-torch.arange(0, width // 8, 2) / (width // 8))
        angles = torch.outer(torch.arange(SIZE.length), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return x.square().mean()


@pytest.fixture(scope="module")
def device() -> torch.device:
    if not torch.accelerator.is_available():
        pytest.skip("this machine has no accelerator")
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def reproducible() -> None:
    """Where an operator has a deterministic variant, use that."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def batch(device: torch.device) -> Tensor:
    return torch.randn(*SIZE, generator=torch.Generator().manual_seed(1)).to(device)


def options(name: str) -> dict[str, Any]:
    """One of three configurations: all in host memory, all on disk, and too little host memory."""
    unit = SIZE.stream_bytes
    common = {
        "min_offload_bytes": unit // 8,
        "window_bytes": 4 * unit,
        "prefetch_bytes": 4 * unit,
        "keep_last_bytes": unit,
    }
    return {
        "host": common,
        "disk": {**common, "policy": lambda tensor: offload.Placement.DISK},
        "host+disk": {**common, "host_budget": 8 * unit},
    }[name]


def gradients(model: nn.Module, x: Tensor, step: Step, autocast: bool = False) -> list[Tensor]:
    for _ in range(2):
        model.zero_grad()
        cast = torch.autocast(x.device.type, torch.bfloat16, enabled=autocast)
        with step():
            with cast:
                loss = model(x)
            loss.backward()
    torch.accelerator.synchronize()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checked", ["0", "1"], ids=["", "checked"])
@pytest.mark.parametrize("name", ["host", "disk", "host+disk"])
@pytest.mark.parametrize("kind", ["plain", "autocast", "recompute"])
def test_same_bits(
    kind: str, name: str, checked: str, device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFLOAD_CHECK", checked)
    torch.manual_seed(0)
    plain = Stack(recompute=kind == "recompute").to(device)
    ours = copy.deepcopy(plain)
    x = batch(device)
    autocast = kind == "autocast"
    expected = gradients(plain, x, contextlib.nullcontext, autocast)
    with offload.Session(disk_dir=tmp_path, device=device.type, **options(name)) as session:
        found = gradients(ours, x, session.step, autocast)
        report = session.report()
    for a, b in zip(expected, found, strict=True):
        assert torch.equal(a, b)
    assert report.offloaded_bytes > 4 * SIZE.stream_bytes
    assert report.peak_arena_bytes <= session.config.arena_bytes


def test_the_device_holds_less(device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack().to(device)
    x = batch(device)

    def peak_bytes(step: Step) -> int:
        gradients(model, x, step)
        torch.accelerator.reset_peak_memory_stats()
        base_bytes = torch.accelerator.memory_allocated()
        gradients(model, x, step)
        return torch.accelerator.max_memory_allocated() - base_bytes

    plain = peak_bytes(contextlib.nullcontext)
    small = {**options("host"), "keep_last_bytes": 0}
    with offload.Session(disk_dir=tmp_path, device=device.type, **small) as session:
        ours = peak_bytes(session.step)
    assert ours < plain / 2
