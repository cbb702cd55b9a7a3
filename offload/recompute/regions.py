"""A region: a function with its inputs, called once by forward and again by each recomputation.

[Note: boundaries are positional tensors] torch saves the tensors among the positional arguments of
a checkpointed function, through the saved-tensor hooks that are active, and holds everything else
by reference: what is inside a list, a dict or a keyword argument never meets a hook. A region
therefore takes its inputs apart, hands torch the tensors alone, and puts them together again when
it is recomputed.

[Note: parameters are told apart] A hook gives back a tensor that is no ``nn.Parameter``, and not
the object that an optimizer or a sharding library knows. So a recomputation gets the parameter
itself. It is saved all the same: that is how torch notices that it was modified in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offload.recompute.statistics import modules_of, statistics_kept

__all__ = ["Composed", "Region"]

T = TypeVar("T")
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes})  # hold no tensor, surely


class Composed:
    """A callable that is made of others."""

    __slots__ = ("functions",)

    def __init__(self, functions: list[Callable[..., Any]]) -> None:
        self.functions = functions


class Region(Generic[T]):
    """``function`` with its inputs; called with ``boundaries``, or with what was saved of them.

    The first call is the forward. It passes the caller's own objects on, whatever they are, and
    lets go of them; later calls pass copies of the containers as they were before the forward.

    Args:
        function: what to run. A ``functools.partial`` is taken apart, as its arguments are inputs.
        args: positional inputs.
        kwargs: inputs by name.
    """

    __slots__ = ("_fresh", "_function", "_kept", "_names", "_positional", "_slots", "_spec")

    def __init__(
        self, function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        while type(function) is partial:
            args = (*function.args, *args)
            kwargs = {**function.keywords, **kwargs}
            function = function.func
        self._function = function
        self._fresh: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._positional = len(args)
        self._names = tuple(kwargs)
        leaves: list[Any] = [*args, *kwargs.values()]
        self._spec: pytree.TreeSpec | None = None
        if not all(type(leaf) in _ATOMS or isinstance(leaf, Tensor) for leaf in leaves):
            leaves, self._spec = pytree.tree_flatten(leaves)
        self._kept = leaves
        self._slots: list[tuple[int, int]] = []  # leaf and boundary that belong together

    def boundaries(self) -> list[Tensor]:
        """The tensors among the inputs, each object once, for torch to save. Call it once."""
        found: list[Tensor] = []
        number_of: dict[int, int] = {}
        for leaf, value in enumerate(self._kept):
            if not isinstance(value, Tensor):
                continue
            number = number_of.get(id(value))
            if number is None:
                number = number_of[id(value)] = len(found)
                found.append(value)
            if not isinstance(value, nn.Parameter):  # see Note: parameters are told apart
                self._slots.append((leaf, number))
                self._kept[leaf] = None
        return found

    @property
    def name(self) -> str:
        """Of its function."""
        return getattr(self._function, "__qualname__", type(self._function).__name__)

    def __call__(self, *boundaries: Tensor) -> T:
        """The function's result."""
        if self._fresh is not None:
            args, kwargs = self._fresh
            self._fresh = None
            return self._function(*args, **kwargs)
        leaves = self._kept.copy()
        for leaf, number in self._slots:
            leaves[leaf] = boundaries[number]
        if self._spec is not None:
            leaves = self._spec.unflatten(leaves)
        named = dict(zip(self._names, leaves[self._positional :], strict=True))
        with statistics_kept(self.modules):
            return self._function(*leaves[: self._positional], **named)

    @property
    def modules(self) -> list[nn.Module]:
        """Those that it calls, as far as its function and its inputs tell."""
        function = self._function
        parts = function.functions if isinstance(function, Composed) else [function]
        passed = [value for value in self._kept if isinstance(value, nn.Module)]
        return passed + [module for part in parts for module in modules_of(part)]
