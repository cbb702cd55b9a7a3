"""FSDP, both versions: the same bits, and no unsharded parameter is ever copied."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import offload
from tests.distributed.programs import (
    Block,
    Run,
    batch,
    compared,
    gradients,
    trained,
    transformer,
)
from tests.distributed.ranks import Ranks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "resharded": {"reshard_after_forward": True},
    "kept whole": {"reshard_after_forward": False},
    "mixed precision": {"mp_policy": BF16},
    "on the host": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


def sharded(model: nn.Sequential, **options: Any) -> nn.Module:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def unsharded(directory: str, dtype: torch.dtype) -> offload.StepReport:
    """The same computation without FSDP: what leaves then is what may leave with it."""

    def program(run: Run) -> list[Tensor]:
        model = transformer().to(dtype)
        found = []
        for step in range(2):
            with run.step():
                model(batch(step).to(dtype)).float().square().mean().backward()
            found += gradients(model)
        return found

    return compared(program, directory)


def fsdp2(directory: str, options: dict[str, Any]) -> offload.StepReport:
    return compared(lambda run: trained(sharded(transformer(), **options), run), directory)


@pytest.mark.parametrize("name", OPTIONS)
def test_bits_and_counts(two: Ranks, tmp_path: Path, name: str) -> None:
    dtype = torch.bfloat16 if name == "mixed precision" else torch.float32
    alone = two.run(unsharded, str(tmp_path), dtype)
    reports = two.run(fsdp2, str(tmp_path), OPTIONS[name])
    for report, reference in zip(reports, alone, strict=True):
        assert report.offloaded_blocks == reference.offloaded_blocks > 0
        assert report.offloaded_bytes == reference.offloaded_bytes
        assert report.kept_bytes["parameter"] == reference.kept_bytes["parameter"] > 0


def accumulation(directory: str, reshard: bool) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        model = sharded(transformer())
        with run.step():
            for i in range(3):
                model.set_requires_gradient_sync(i == 2)
                if not reshard:
                    model.set_reshard_after_backward(i == 2)
                model(batch(i)).square().mean().backward()
        return gradients(model)

    return compared(program, directory)


@pytest.mark.parametrize("reshard", [True, False])
def test_accumulation(two: Ranks, tmp_path: Path, reshard: bool) -> None:
    for report in two.run(accumulation, str(tmp_path), reshard):
        assert report.offloaded_blocks > 0


def checkpointed(directory: str, order: str, impl: CheckpointImpl) -> offload.StepReport:
    """checkpoint_wrapper inside or outside of fully_shard, or only around the MLP."""

    def program(run: Run) -> list[Tensor]:
        model = transformer()
        for i, block in enumerate(model):
            if order == "shard the wrapper":
                model[i] = fully_shard(checkpoint_wrapper(block, checkpoint_impl=impl))
            elif order == "wrap the shard":
                model[i] = checkpoint_wrapper(fully_shard(block), checkpoint_impl=impl)
            else:
                block.mlp = checkpoint_wrapper(block.mlp, checkpoint_impl=impl)
                fully_shard(block)
        return trained(fully_shard(model), run)

    return compared(program, directory)


@pytest.mark.parametrize("impl", list(CheckpointImpl))
@pytest.mark.parametrize("order", ["shard the wrapper", "wrap the shard", "part of a block"])
def test_checkpoint_wrapper(two: Ranks, tmp_path: Path, order: str, impl: CheckpointImpl) -> None:
    for report in two.run(checkpointed, str(tmp_path), order, impl):
        assert report.offloaded_blocks > 0


RULES: dict[str, dict[Any, str]] = {
    "recompute blocks": {Block: "recompute+disk"},
    "recompute a part": {"*.mlp": "recompute+disk", "*.attention": "disk"},
    "selective": {"*": "selective"},
    "keep": {"*.attention": "keep", "**": "disk"},
}


def ruled(directory: str, name: str, rules_first: bool) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        model = transformer()
        with contextlib.ExitStack() as stack:
            if rules_first:
                stack.enter_context(run.apply(model, RULES[name]))
            model = sharded(model)
            if not rules_first:
                stack.enter_context(run.apply(model, RULES[name]))
            return trained(model, run)

    return compared(program, directory)


@pytest.mark.parametrize("rules_first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", RULES)
def test_rules(two: Ranks, tmp_path: Path, name: str, rules_first: bool) -> None:
    for report in two.run(ruled, str(tmp_path), name, rules_first):
        assert report.offloaded_blocks > 0


def fsdp1(directory: str, options: dict[str, Any]) -> offload.StepReport:
    def program(run: Run) -> list[Tensor]:
        model = FullyShardedDataParallel(
            transformer(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            **options,
        )
        return trained(model, run)

    return compared(program, directory)


@pytest.mark.parametrize(
    "options",
    [
        {"use_orig_params": False},
        {"use_orig_params": True},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "use_orig_params": True},
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
    ],
    ids=["flat", "original", "gradients only", "mixed precision"],
)
def test_fsdp1(two: Ranks, tmp_path: Path, options: dict[str, Any]) -> None:
    dtype = torch.bfloat16 if "mixed_precision" in options else torch.float32
    alone = two.run(unsharded, str(tmp_path), dtype)
    reports = two.run(fsdp1, str(tmp_path), options)
    for report, reference in zip(reports, alone, strict=True):
        assert report.offloaded_blocks == reference.offloaded_blocks > 0
        assert report.offloaded_bytes == reference.offloaded_bytes
