"""What every workload offers: a model, batches and a step, all reproducible from a seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

__all__ = ["Batch", "BatchMaker", "BlockWrapper", "TrainableModel", "Workload"]

Batch: TypeAlias = tuple[Tensor, ...]
BlockWrapper: TypeAlias = Callable[[nn.Module], Callable[..., Tensor]]
# Draws one batch: the generator decides which, the flag takes it from data never trained on.
BatchMaker: TypeAlias = Callable[[torch.Generator, bool], Batch]


def _as_is(block: nn.Module) -> Callable[..., Tensor]:
    return block


class TrainableModel(nn.Module):
    """A model whose forward takes a batch and returns a scalar loss, built from repeated blocks.

    Attributes:
        wrap_block: makes the callable that is run in place of each repeated block. The block itself
            by default; set it to recompute blocks, for instance.

    Example:
        >>> from functools import partial
        >>> from torch.utils.checkpoint import checkpoint
        >>> from offload.workloads import preset
        >>> model = preset("gpt-tiny").build(seed=0)
        >>> model.wrap_block = lambda block: partial(checkpoint, block, use_reentrant=False)
    """

    def __init__(self) -> None:
        super().__init__()
        self.wrap_block: BlockWrapper = _as_is

    def run_block(self, block: nn.Module, *inputs: Tensor) -> Tensor:
        """The output of ``block`` for ``inputs``, through ``wrap_block``."""
        return self.wrap_block(block)(*inputs)


@dataclass(frozen=True)
class Workload:
    """A training task that demo, benchmark, tuning and tests share.

    Args:
        name: what it is called on the command line.
        summary: model and sizes, in one line.
        make_model: builds the model from torch's global random state.
        make_batch: draws one batch from a generator; True asks for data kept out of training.

    Example:
        >>> from offload.workloads import preset
        >>> workload = preset("gpt-tiny")
        >>> model = workload.build(seed=0)
        >>> for batch in workload.batches(2, seed=1):
        ...     workload.step(model, batch).backward()
    """

    name: str
    summary: str
    make_model: Callable[[], TrainableModel]
    make_batch: BatchMaker

    def build(self, seed: int) -> TrainableModel:
        """A model in training mode; the same seed gives the same bits.

        The global random state is left as it was.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_model().train()

    def batches(self, count: int, seed: int, *, held_out: bool = False) -> Iterator[Batch]:
        """``count`` batches on the CPU; the same seed gives the same batches.

        Args:
            count: how many; a longer run starts with the batches of a shorter one.
            seed: chooses them.
            held_out: draw from the data that training never sees.
        """
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            yield self.make_batch(generator, held_out)

    def step(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of ``model`` on ``batch``, a scalar that requires grad."""
        loss = model(*batch)
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"the model returned {type(loss).__name__}; a workload's returns a loss"
            )
        return loss
