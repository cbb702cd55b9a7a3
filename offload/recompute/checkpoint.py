"""checkpoint: torch's non-reentrant checkpoint, whose inputs all meet the saved-tensor hooks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.utils.checkpoint as torch_checkpoint

from offload.recompute.regions import Region

__all__ = ["ContextFn", "checkpoint"]

T = TypeVar("T")
ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


def checkpoint(
    function: Callable[..., T],
    *args: Any,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: str = "default",
    debug: bool = False,
    context_fn: ContextFn = torch_checkpoint.noop_context_fn,
    early_stop: bool = True,
    **kwargs: Any,
) -> T:
    """Run ``function`` without keeping its activations; backward computes them again.

    The contract of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``.

    Example:
        >>> import torch, offload
        >>> x = torch.ones(3, requires_grad=True)
        >>> checkpoint(lambda inputs: inputs["h"].exp().sin(), {"h": x}).sum().backward()
        >>> x.grad.shape
        torch.Size([3])
    """
    if use_reentrant:
        raise ValueError(
            "offload.checkpoint is the non-reentrant kind: leave use_reentrant out, or call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=True)"
        )
    region = Region(function, args, kwargs)
    result: T = torch_checkpoint.checkpoint(
        region,
        *region.boundaries(),
        use_reentrant=False,
        preserve_rng_state=preserve_rng_state,
        determinism_check=determinism_check,
        debug=debug,
        context_fn=context_fn,
        **({} if early_stop else {"early_stop": False}),  # unknown to older versions
        **_NEWER_OPTIONS,
    )
    return result


# From torch 2.14 on it must be said whether what a selective policy keeps goes through the hooks.
_NEWER_OPTIONS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if "respect_saved_tensors_hooks" in inspect.signature(torch_checkpoint.checkpoint).parameters
    else {}
)
