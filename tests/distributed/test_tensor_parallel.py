"""Tensor and sequence parallelism over DTensor, also together with FSDP2."""

from pathlib import Path

import pytest
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
from tests.distributed.programs import Run, compared, trained, transformer
from tests.distributed.ranks import Ranks

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
        print(report)


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
        print(report)
