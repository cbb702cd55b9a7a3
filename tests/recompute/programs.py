"""What the tests of checkpoints share: one program, run in all ways that must not differ."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

import offload
from tests.support import Context, assert_identical

Run = Callable[..., Any]
Program = Callable[[Run, Context], list[Tensor]]
plain = contextlib.nullcontext


def direct(function: Run, *args: Any, **kwargs: Any) -> Any:
    """No checkpoint."""
    return function(*args, **kwargs)


def torchs(function: Run, *args: Any, **kwargs: Any) -> Any:
    """The checkpoint of torch."""
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def assert_no_difference(program: Program, session: offload.Session) -> None:
    """The same bits for no checkpoint, torch's and ours, with and without a session.

    And the same operations as torch's. A program ends with its backward, and gives back what it
    computed and the random state after it.
    """
    expected = None
    flops = []
    for run, context in (
        (direct, plain),
        (torchs, plain),
        (offload.checkpoint, plain),
        (offload.checkpoint, session.step),
    ):
        torch.manual_seed(0)
        with FlopCounterMode(display=False) as counter:
            results = [*program(run, context), torch.get_rng_state()]
        if expected is None:
            expected = results
        else:
            flops.append(counter.get_flop_counts())
            assert_identical(expected, results)
    assert flops[0] == flops[1] == flops[2]
