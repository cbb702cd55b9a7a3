"""Tensor and sequence parallelism over DTensor, also together with FSDP2."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import offload
from tests.distributed.programs import Run, compared, opened, trained, transformer
from tests.distributed.ranks import Ranks
from tests.support import drain, rand

TENSOR = {
    "attention.q": ColwiseParallel(),
    "attention.k": ColwiseParallel(),
    "attention.v": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "mlp.up": ColwiseParallel(),
    "mlp.down": RowwiseParallel(),
}
SEQUENCE = {
    "norm1": SequenceParallel(),
    "attention": PrepareModuleInput(
        input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
    ),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "norm2": SequenceParallel(),
    "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
}


class SplitSequence(nn.Module):
    """Gives every rank its part of the sequence, and gathers the whole in the end."""

    def __init__(self, model: nn.Module, mesh) -> None:
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, x: Tensor) -> Tensor:
        part = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        part = part.redistribute(placements=[Shard(1)]).to_local()
        out = DTensor.from_local(self.model(part), self.mesh, [Shard(1)], run_check=False)
        return out.redistribute(placements=[Replicate()]).to_local()


def parallel(mesh, *, sequence: bool) -> nn.Module:
    model = transformer()
    for block in model:
        parallelize_module(block, mesh, {**TENSOR, **(SEQUENCE if sequence else {})})
    return SplitSequence(model, mesh) if sequence else model


def tensor_parallel(directory: str, sequence: bool) -> offload.StepReport:
    mesh = init_device_mesh("cpu", (2,))

    def program(run: Run) -> list[Tensor]:
        return trained(parallel(mesh, sequence=sequence), run, same_batch=True)

    return compared(program, directory)


@pytest.mark.parametrize("sequence", [False, True], ids=["tensor", "sequence"])
def test_tensor_parallel(two: Ranks, tmp_path: Path, sequence: bool) -> None:
    for report in two.run(tensor_parallel, str(tmp_path), sequence):
        assert report.kept_bytes.keys() == {"parameter"}
        assert report.offloaded_bytes > 0


def lives_of_a_dtensor(directory: str) -> None:
    """Its part leaves memory, comes back under a wrapper of the same kind, twice if need be, and a
    change in place is noticed although it is the wrapper's.
    """
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(rand(8, 8), mesh, [Shard(0)], run_check=False).requires_grad_()
    with opened(directory) as session:
        with session.step() as step:
            h = x * 2
            part = weakref.ref(h.to_local().untyped_storage())
            loss = h.exp().sin().to_local().sum()
            del h
            gc.collect()
            drain(session)
            assert part() is None, "it still takes up memory"
            loss.backward(retain_graph=True)
            (first,) = torch.autograd.grad(loss, x)
            assert isinstance(first, DTensor)
            assert torch.equal(first.to_local(), x.grad.to_local())
            assert step.report.kept_bytes == {}
        loss = first = None
        with session.step():
            h = x * 2
            loss = h.sin().to_local().sum()
            h.add_(1)
            with pytest.raises(RuntimeError, match=r"modified by an inplace.*\[16, 8\]"):
                loss.backward()
            h = loss = None


def test_lives_of_a_dtensor(two: Ranks, tmp_path: Path) -> None:
    two.run(lives_of_a_dtensor, str(tmp_path))


def two_dimensions(directory: str) -> offload.StepReport:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def program(run: Run) -> list[Tensor]:
        model = parallel(mesh["tensor"], sequence=False)
        for block in model:
            fully_shard(block, mesh=mesh["data"])
        return trained(fully_shard(model, mesh=mesh["data"]), run, same_batch=True)

    return compared(program, directory)


def test_tensor_parallel_within_fsdp(four: Ranks, tmp_path: Path) -> None:
    for report in four.run(two_dimensions, str(tmp_path)):
        assert report.kept_bytes.keys() == {"parameter"}
        assert report.offloaded_bytes > 0
