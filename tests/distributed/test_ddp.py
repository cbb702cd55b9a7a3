"""DistributedDataParallel: the same bits on every rank, and nothing left."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import offload
from tests.distributed.programs import (
    Run,
    batch,
    compared,
    gradients,
    trained,
    transformer,
)
from tests.distributed.ranks import Ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "static graph": {"static_graph": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.01, "gradient_as_bucket_view": True},
}


def plain_ddp(directory: str, options: dict[str, Any]) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        return trained(DistributedDataParallel(transformer(), **options), run, steps=3)

    return compared(program, directory)


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_and_counts(two: Ranks, tmp_path: Path, name: str) -> None:
    """What leaves is what leaves without DDP: no bucket, no parameter, no copy of one."""
    alone = two.run(without_ddp, str(tmp_path))
    reports = two.run(plain_ddp, str(tmp_path), OPTIONS[name])
    for report, reference in zip(reports, alone, strict=True):
        assert report.offloaded_blocks == reference.offloaded_blocks > 0
        assert report.offloaded_bytes == reference.offloaded_bytes
        assert report.kept_bytes == reference.kept_bytes


def without_ddp(directory: str) -> offload.StepReport:
    return compared(lambda run: trained(transformer(), run, steps=3), directory)


class SometimesUnused(nn.Module):
    """Every rank leaves out another of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = transformer(layers=3)

    def forward(self, x: Tensor) -> Tensor:
        left_out = 1 + dist.get_rank() % 2
        for i, block in enumerate(self.blocks):
            if i != left_out:
                x = block(x)
        return x


def unused_parameters(directory: str) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        model = DistributedDataParallel(SometimesUnused(), find_unused_parameters=True)
        return trained(model, run)

    return compared(program, directory)


def test_unused_parameters(two: Ranks, tmp_path: Path) -> None:
    for report in two.run(unused_parameters, str(tmp_path)):
        assert report.offloaded_blocks > 0


def accumulation(directory: str, one_step: bool) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        model = DistributedDataParallel(transformer(), gradient_as_bucket_view=True)
        with run.step() if one_step else contextlib.nullcontext():
            for i in range(3):
                quiet = model.no_sync() if i < 2 else contextlib.nullcontext()
                with quiet, contextlib.nullcontext() if one_step else run.step():
                    model(batch(i)).square().mean().backward()
        return gradients(model)

    return compared(program, directory)


@pytest.mark.parametrize("one_step", [True, False])
def test_accumulation_without_synchronisation(two: Ranks, tmp_path: Path, one_step: bool) -> None:
    for report in two.run(accumulation, str(tmp_path), one_step):
        assert report.steps == (1 if one_step else 3)
        assert report.offloaded_blocks > 0


def compressed(directory: str) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        model = DistributedDataParallel(transformer())
        model.register_comm_hook(None, fp16_compress_hook)
        return trained(model, run)

    return compared(program, directory)


def test_communication_hook(two: Ranks, tmp_path: Path) -> None:
    for report in two.run(compressed, str(tmp_path)):
        assert report.offloaded_blocks > 0


def autocast(directory: str) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        model = DistributedDataParallel(transformer(), static_graph=True)
        with torch.autocast("cpu", torch.bfloat16):
            return trained(model, run)

    return compared(program, directory)


def test_autocast(two: Ranks, tmp_path: Path) -> None:
    for report in two.run(autocast, str(tmp_path)):
        assert report.offloaded_blocks > 0
        assert report.kept_bytes["parameter"] > 0


def ruled(directory: str, recompute: bool) -> offload.StepReport:
    rules = {"*.mlp": "recompute+disk"} if recompute else {"*.attention": "keep", "**": "disk"}

    def program(run: Run) -> list[Tensor]:
        model = transformer()
        with run.apply(model, rules):
            return trained(DistributedDataParallel(model), run)

    return compared(program, directory)


@pytest.mark.parametrize("recompute", [True, False])
def test_rules(two: Ranks, tmp_path: Path, recompute: bool) -> None:
    alone = two.run(without_ddp, str(tmp_path))
    for report, reference in zip(two.run(ruled, str(tmp_path), recompute), alone, strict=True):
        assert 0 < report.offloaded_blocks < reference.offloaded_blocks
