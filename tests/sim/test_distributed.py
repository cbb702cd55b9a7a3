"""DDP and FSDP2 on the simulated accelerator, whose detector sees every access that no event
orders: FSDP fills and empties parameters on streams of its own while ours copy.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lonely
import pytest
import simdev
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tests.sim.offloading import CONFIGURATIONS, session_on_sim
from tests.sim.test_device_training import WIDTH, Block
from tests.support import assert_identical


@pytest.fixture(scope="module", autouse=True)
def _group(_backend: None) -> Iterator[None]:
    lonely.start()
    yield
    dist.destroy_process_group()


def sharded(model: nn.Sequential, **options: Any) -> nn.Module:
    mesh = init_device_mesh("sim", (1,))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("sim", (1,))
    for block in model:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


KINDS: dict[str, Callable[[Any], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp2": sharded,
    "fsdp2 kept whole": functools.partial(sharded, reshard_after_forward=False),
    "fsdp2 on the host": functools.partial(
        sharded, offload_policy=CPUOffloadPolicy(pin_memory=False)
    ),
    "tensor parallel": tensor_parallel,
}


def trained(kind: str, context: Callable[[], Any]) -> list[Tensor]:
    torch.manual_seed(0)
    model = KINDS[kind](nn.Sequential(Block(), Block(), Block()).to("sim"))
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(2):
        x = torch.randn(4, 16, WIDTH, generator=generator).to("sim")
        with context():
            loss = model(x).square().mean()
            loss.backward()
        for parameter in model.parameters():
            grad = parameter.grad
            assert grad is not None
            found.append((grad.to_local() if isinstance(grad, DTensor) else grad).cpu().clone())
        found.append(loss.detach().cpu())
        model.zero_grad()
    return found


@functools.cache
def alone(kind: str) -> list[Tensor]:
    return trained(kind, contextlib.nullcontext)


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_order(tmp_path: Path, kind: str, configuration: str) -> None:
    expected = alone(kind)
    simdev.configure(scheduler=simdev.Scheduler.RANDOM, seed=1)
    with session_on_sim(str(tmp_path), **CONFIGURATIONS[configuration]) as session:
        assert_identical(expected, trained(kind, session.step))
        report = session.report()
    assert report.offloaded_blocks > 0
    assert (report.written_bytes > 0) == (configuration != "host")
    assert "kind" not in report.kept_bytes


def test_unsharded_parameters_never_move(tmp_path: Path) -> None:
    """As much leaves as does without FSDP."""
    moved = set()
    KINDS["plain"] = lambda model: model
    for kind in ("plain", "ddp", "fsdp2", "fsdp2 kept whole"):
        with session_on_sim(str(tmp_path)) as session:
            trained(kind, session.step)
            report = session.report()
        assert report.kept_bytes["parameter"] > 0
        moved.add((report.offloaded_blocks, report.offloaded_bytes))
    assert len(moved) == 1
