"""Caches of keys and values, which a layer that runs twice would fill twice.

A layer of a language model appends to the cache that it is handed. Training has no use for that,
but it is what models of Hugging Face do unless told otherwise. So a layer that is to be recomputed
gets no cache while that holds nothing for it, as with transformers' own activation checkpointing.
What it does hold (a prefix) is needed: then recomputations get the cache as it was before the
forward. Caches are known by what they can do; no library is imported.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["run_twice"]


def run_twice(
    module: nn.Module,
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tell: Callable[[str], None],
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """``forward`` of ``module`` and its inputs, such that it can run again.

    ``tell`` is called with a warning where a cache is left out.
    """
    inputs = [*args, *kwargs.values()]
    if not any(_is_cache(value) for value in inputs):
        return forward, args, kwargs
    made = [_for_layer(value, module) if _is_cache(value) else value for value in inputs]
    named = dict(zip(kwargs, made[len(args) :], strict=True))
    if made.count(None) > inputs.count(None):
        tell(
            f"{type(module).__name__} was handed a cache of keys and values. Recomputed, it would "
            "fill that again: it runs without, as training does not need it. Tell the model "
            "so, model.config.use_cache = False"
        )
        if named.get("use_cache"):
            named["use_cache"] = False

    def run(*args: Any, **kwargs: Any) -> Any:
        named = {name: _given(value) for name, value in kwargs.items()}
        return forward(*map(_given, args), **named)

    return run, tuple(made[: len(args)]), named


class _Prefix:
    """A cache that holds something: itself for the forward, and for each recomputation a copy of
    what it was.
    """

    def __init__(self, cache: Any) -> None:
        self._cache: Any = cache
        self._before = _copied(cache)

    def give(self) -> Any:
        cache, self._cache = self._cache, None
        return cache if cache is not None else _copied(self._before)


def _given(value: Any) -> Any:
    return value.give() if isinstance(value, _Prefix) else value


def _is_cache(value: Any) -> bool:
    kind = type(value)
    return hasattr(kind, "get_seq_length") and hasattr(kind, "update")


def _for_layer(cache: Any, module: nn.Module) -> _Prefix | None:
    numbers = (getattr(part, "layer_idx", None) for part in module.modules())
    number = next((n for n in numbers if isinstance(n, int)), 0)
    return _Prefix(cache) if int(cache.get_seq_length(number)) else None


def _copied(cache: Any) -> Any:
    """The same tensors in other objects: an update replaces them, or writes what is there."""
    made = copy.copy(cache)
    for name, value in vars(made).items():
        if isinstance(value, list):
            setattr(made, name, [v if isinstance(v, Tensor) else copy.copy(v) for v in value])
        elif isinstance(value, dict):
            setattr(made, name, dict(value))
        elif _is_cache(value):
            setattr(made, name, _copied(value))
    return made
