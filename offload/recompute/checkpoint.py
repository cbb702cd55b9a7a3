"""checkpoint: torch's non-reentrant checkpoint, whose inputs all meet the saved-tensor hooks."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch.utils.checkpoint as torch_checkpoint

from offload.recompute.regions import Region
from offload.recompute.verify import current_verifier

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

    The contract of ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, on which it is
    built: the same bits, operations and random numbers, autocast as it was. Beyond that:

    - Every tensor among the inputs is saved, and inside a step of a session waits for backward on
      its tiers: also one inside a tuple, list, dict or another container that torch's pytree knows,
      passed by name, or bound by ``functools.partial``. torch holds those in memory. What
      ``function`` finds elsewhere, in its closure or module, stays where it is.
    - The recomputation gets containers as they were before the forward, whatever that did to them.
    - Normalisations count a batch once: their running statistics do not move again. They are
      found in ``function`` if that is a module, a method of one, or mentions one in its own code,
      and in modules among the inputs. Other state that a forward changes is changed twice.

    A recomputation serves one backward: all outputs of ``function``, and all that one call asks
    for. A second backward over a retained graph recomputes again, as does each of several calls
    that ask for different outputs, since what was recomputed is let go of as soon as it was used:
    that is the point of it. ``torch.utils.checkpoint.GraphExecGroup`` makes several calls share one
    recomputation where they do not overlap. With one checkpoint inside another, the outer one's
    recomputation runs the inner function for its result and the inner one's for its activations:
    each level is one more call.

    Args:
        function: what to run; it must do the same when it is run again.
        *args: its inputs: tensors of any shape, containers of them, anything else.
        use_reentrant: for callers that pass it to torch; must be False.
        preserve_rng_state: draw the same random numbers again.
        determinism_check: ``"default"`` compares shape, dtype and device of what is recomputed with
            what was saved; ``"none"`` does not.
        debug: say in errors which operations ran in forward and in recomputation.
        context_fn: makes two context managers, one around the forward and one around the
            recomputation.
        early_stop: end a recomputation with the last tensor that is needed.
        **kwargs: inputs by name.

    Returns:
        What ``function`` returns.

    Raises:
        TypeError: ``function`` cannot be called.
        ValueError: ``use_reentrant`` is true, ``determinism_check`` is another word, or ``debug``
            meets a ``context_fn``.
        torch.utils.checkpoint.CheckpointError: from backward, when the recomputation saved other
            tensors than the forward.
        RuntimeError: from backward, when an input was modified in place since.

    Example:
        >>> import torch, offload
        >>> x = torch.ones(3, requires_grad=True)
        >>> checkpoint(lambda inputs: inputs["h"].exp().sin(), {"h": x}).sum().backward()
        >>> x.grad.shape
        torch.Size([3])

    Source: Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016.
    """
    if not callable(function):
        raise TypeError(
            f"{function!r} cannot be called: pass the function, and its inputs after it"
        )
    if use_reentrant:
        raise ValueError(
            "offload.checkpoint is the non-reentrant kind: leave use_reentrant out, or call "
            "torch.utils.checkpoint.checkpoint(..., use_reentrant=True)"
        )
    region = Region(function, args, kwargs)
    verifier = current_verifier()
    if verifier is not None and not _is_debugged(debug):  # which takes no context_fn
        context_fn = functools.partial(verifier.contexts, region, context_fn)
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


def _is_debugged(debug: bool) -> bool:
    """What ``set_checkpoint_debug_enabled`` says counts more than what a caller says."""
    for_all: bool | None = getattr(torch_checkpoint, "_checkpoint_debug_enabled", None)
    return debug if for_all is None else for_all


# From torch 2.14 on it must be said whether what a selective policy keeps goes through the hooks.
_NEWER_OPTIONS: dict[str, Any] = (
    {"respect_saved_tensors_hooks": True}
    if "respect_saved_tensors_hooks" in inspect.signature(torch_checkpoint.checkpoint).parameters
    else {}
)
