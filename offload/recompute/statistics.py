"""Running statistics: a recomputation must not count a batch again.

BatchNorm in training moves its running mean and variance in forward. A recomputation is not another
batch, so it works on copies of these buffers, which are dropped: the results have the same bits, as
training normalises by the batch's own statistics. The modules are found from the function itself;
torch has no place where every call of a module could be seen without slowing all of them down.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import _disable_current_modes

__all__ = ["is_statistic", "modules_of", "statistics_kept"]

# A model is walked through once, not for every recomputation of each of its blocks.
_norms_of: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[_NormBase]]] = (
    weakref.WeakKeyDictionary()
)


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that ``function`` is, belongs to, or mentions in its own code, if only by one of
    their methods.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2)
        >>> modules_of(layer) == modules_of(layer.forward) == [layer]
        True
        >>> modules_of(lambda x: x + layer(x)) == [layer]
        True
    """
    if isinstance(function, nn.Module):
        return [function]
    mentioned: list[Any] = []
    if isinstance(function, MethodType):
        mentioned.append(function.__self__)
        function = function.__func__
    if isinstance(function, FunctionType):
        names = function.__globals__
        mentioned += [names.get(name) for name in function.__code__.co_names]
        mentioned += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # empty: not assigned yet
                mentioned.append(cell.cell_contents)
    owners = (v.__self__ if isinstance(v, MethodType) else v for v in mentioned)
    return [owner for owner in owners if isinstance(owner, nn.Module)]


@contextlib.contextmanager
def statistics_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """In the block, normalisations in training move copies of their running statistics."""
    swapped: dict[nn.Module, dict[str, Tensor | None]] = {}
    try:
        for norm in _norms(modules):
            if norm not in swapped and norm.training and norm.track_running_stats:
                swapped[norm] = dict(norm._buffers)
                with _disable_current_modes():  # the forward made no copies: they are not its doing
                    for name, buffer in swapped[norm].items():
                        norm._buffers[name] = None if buffer is None else buffer.detach().clone()
        yield
    finally:
        for norm, buffers in swapped.items():
            norm._buffers.update(buffers)


def is_statistic(value: object, modules: Iterable[nn.Module]) -> bool:
    """Whether it is a buffer that a normalisation among ``modules`` moves."""
    return any(value is buffer for norm in _norms(modules) for buffer in norm._buffers.values())


def _norms(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        norms = _norms_of.get(module)
        if norms is None:
            found = (child for child in module.modules() if isinstance(child, _NormBase))
            norms = _norms_of[module] = [weakref.ref(child) for child in found]
        for reference in norms:
            norm = reference()
            if norm is not None:
                yield norm
