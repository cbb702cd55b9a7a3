"""Selectors: which modules of a model a rule is for."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import NamedTuple, TypeVar

from torch import nn

__all__ = ["Selector", "choose", "every"]

T = TypeVar("T")


class Every(NamedTuple):
    """A selector made by ``every``."""

    k: int
    selector: Selector
    start: int


Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Every
_Named = list[tuple[str, nn.Module]]


def every(k: int, selector: Selector, *, start: int = 0) -> Every:
    """Every ``k``-th of the modules that ``selector`` chooses, in the model's order.

    Args:
        k: 2 for every other.
        selector: a glob, a class or a function, as in ``Session.apply``.
        start: the first one taken, counted from 0.

    Raises:
        ValueError: ``k`` is below 1 or ``start`` below 0.

    Example:
        >>> import torch, offload
        >>> model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(5)))
        >>> with offload.Session() as session:
        ...     with session.apply(model, {every(2, torch.nn.Linear): "recompute"}) as applied:
        ...         list(applied.actions)
        ['0', '2', '4']
    """
    if k < 1 or start < 0:
        raise ValueError(f"every({k}, start={start}): give k of at least 1 and start of at least 0")
    return Every(k, selector, start)


def choose(model: nn.Module, rules: list[tuple[Selector, T]]) -> dict[str, tuple[nn.Module, T]]:
    """By name, the modules that go by a rule of their own, and what it says.

    From the outside in, a module goes by the first rule that matches it, and else by that of the
    module around it.

    Raises:
        ValueError: a rule matches no module.
        TypeError: a selector has another form.
    """
    named = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if _has_forward(m)]
    matches = [_matching(selector, named) for selector, _ in rules]
    for (selector, _), matching in zip(rules, matches, strict=True):
        if not matching:
            raise ValueError(_nothing_matches(selector, [name for name, _ in named]))
    rule_of: dict[str, int] = {}  # the number of the rule by which a module or one around it goes
    chosen: dict[str, tuple[nn.Module, T]] = {}
    seen: set[nn.Module] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        around = rule_of.get(name.rpartition(".")[0], -1) if name else -1
        first = next((i for i, matching in enumerate(matches) if name in matching), around)
        rule_of[name] = first
        if first != around and module not in seen:
            seen.add(module)  # it may have several names
            chosen[name] = (module, rules[first][1])
    return chosen


def _matching(selector: Selector, named: _Named) -> set[str]:
    if isinstance(selector, Every):
        inner = _matching(selector.selector, named)
        return {
            name for name, _ in [p for p in named if p[0] in inner][selector.start :: selector.k]
        }
    if isinstance(selector, str):
        pattern = _components(selector)
        return {name for name, _ in named if _glob(pattern, _components(name))}
    if isinstance(selector, type):
        return {name for name, module in named if isinstance(module, selector)}
    if callable(selector):
        return {name for name, module in named if selector(name, module)}
    raise TypeError(
        f"{selector!r} chooses no modules: give a glob, a module class or a function of a module's "
        "name and the module"
    )


def _components(name: str) -> list[str]:
    return name.split(".") if name else []  # the model itself has no name


def _glob(pattern: list[str], name: list[str]) -> bool:
    """Component by component; ``**`` stands for any number of them."""
    if not pattern or not name:
        return pattern == name or pattern == ["**"]
    if pattern[0] == "**":
        return _glob(pattern[1:], name) or _glob(pattern, name[1:])
    return fnmatchcase(name[0], pattern[0]) and _glob(pattern[1:], name[1:])


def _has_forward(module: nn.Module) -> bool:
    """A list of modules has none, and no activations."""
    forward = getattr(module, "forward", nn.Module.forward)
    return getattr(forward, "__func__", forward) is not nn.Module.forward


def _nothing_matches(selector: Selector, names: list[str]) -> str:
    wanted = selector if isinstance(selector, str) else ""
    near = get_close_matches(wanted, names, n=5, cutoff=0.0) if wanted else names[:5]
    listed = ", ".join(repr(name) for name in near)
    return (
        f"the rule for {selector!r} matches no module that has a forward; among the model's "
        f"{len(names)} are {listed}"
    )
