"""Rules: which modules of a model keep, offload or recompute their activations.

[Note: a ruled module is of a subclass] While a rule applies, the module's class is a subclass made
for it, as FSDP2 and ``torch.nn.utils.parametrize`` do it. The module itself is not touched: an
attribute would be pickled, and in a copy would still call the module it was made for; a hook cannot
put a recomputation around ``forward``. The subclass has the same name, gives copies and pickles the
class as it was, and knows its one module: other instances that come to be of it are not ruled.
"""

from __future__ import annotations

import copyreg
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from difflib import get_close_matches
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.errors import StateError
from offload.placement import Placement
from offload.recompute.checkpoint import ContextFn, checkpoint
from offload.recompute.selective import selective

__all__ = ["Action", "Applied", "Rules", "Selector", "apply_rules", "every"]


class Action(Enum):
    """What becomes of the activations of a module's forward.

    ``KEEP``, ``HOST``, ``DISK``: saved there, on the device, in host memory or on the disk,
    whatever the session's policy says. ``RECOMPUTE``: given up and computed again, from inputs that
    are kept on the device, in host memory (``RECOMPUTE_HOST``) or on the disk (``RECOMPUTE_DISK``).
    ``SELECTIVE``: only what is cheap is computed again, see ``offload.selective``; its inputs and
    the results of the others go where the session's policy says.
    """

    KEEP = "keep"
    HOST = "host"
    DISK = "disk"
    RECOMPUTE = "recompute"
    RECOMPUTE_HOST = "recompute+host"
    RECOMPUTE_DISK = "recompute+disk"
    SELECTIVE = "selective"

    @classmethod
    def of(cls, value: Action | str) -> Action:
        """The action of this name.

        Raises:
            ValueError: there is none.
        """
        try:
            return cls(value)
        except ValueError:
            listed = ", ".join(repr(a.value) for a in cls)
            raise ValueError(f"{value!r} is no action; choose one of {listed}") from None


class _Plan(NamedTuple):
    placement: Placement | None  # of what is saved, or of the inputs; None: as the policy says
    recomputed: bool
    selective: bool = False


_PLANS = {
    Action.KEEP: _Plan(Placement.KEEP, False),
    Action.HOST: _Plan(Placement.HOST, False),
    Action.DISK: _Plan(Placement.DISK, False),
    Action.RECOMPUTE: _Plan(Placement.KEEP, True),
    Action.RECOMPUTE_HOST: _Plan(Placement.HOST, True),
    Action.RECOMPUTE_DISK: _Plan(Placement.DISK, True),
    Action.SELECTIVE: _Plan(None, True, selective=True),
}
Placed = Callable[[Placement | None], AbstractContextManager[None]]
_Named = list[tuple[str, nn.Module]]


class Every(NamedTuple):
    """A selector made by ``every``."""

    k: int
    selector: Selector
    start: int


Selector = str | type[nn.Module] | Callable[[str, nn.Module], bool] | Every
Rules = Mapping[Selector, Action | str] | Iterable[tuple[Selector, Action | str]]


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


def apply_rules(model: nn.Module, rules: Rules, placed: Placed) -> Applied:
    """``Session.apply``; ``placed`` makes the context in which saved tensors get a placement."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"rules apply to a torch.nn.Module, not to {type(model).__name__}")
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    chosen = _choose(model, [(selector, Action.of(action)) for selector, action in pairs])
    for name, (module, _) in chosen.items():
        if isinstance(module, _Ruled):
            raise StateError(
                f"module {name!r} is ruled already: remove() the rules that were applied before"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"module {name!r} is a ScriptModule, whose forward cannot be replaced: give a rule "
                "for the module around it"
            )
    return Applied(chosen, placed)


class Applied:
    """Rules in force, from ``Session.apply`` on until ``remove()`` or the end of the context.

    Attributes:
        actions: by name, what was chosen for each module that is ruled.
    """

    def __init__(self, chosen: Mapping[str, tuple[nn.Module, Action]], placed: Placed) -> None:
        self.actions = {name: action for name, (_, action) in chosen.items()}
        self._ruled: list[tuple[nn.Module, Any, _Rule]] = []  # module, its class meanwhile
        try:
            for module, action in chosen.values():
                rule = _Rule(module, _PLANS[action], placed)
                ruled = _ruled_class(rule)
                module.__class__ = ruled
                self._ruled.append((module, ruled, rule))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Make every module what it was. May be called twice."""
        while self._ruled:
            module, ruled, rule = self._ruled.pop()
            rule.in_force = False
            if type(module) is ruled:  # somebody may have put a class of theirs above it
                module.__class__ = rule.base

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        listed = ", ".join(f"{name!r}: {action.value!r}" for name, action in self.actions.items())
        return f"<{type(self).__name__} {{{listed}}}>"


# -- choosing -------------------------------------------------------------------------------------


def _choose(
    model: nn.Module, rules: list[tuple[Selector, Action]]
) -> dict[str, tuple[nn.Module, Action]]:
    """By name, the modules to rule."""
    named = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if _has_forward(m)]
    matches = [_matching(selector, named) for selector, _ in rules]
    for (selector, _), matching in zip(rules, matches, strict=True):
        if not matching:
            raise ValueError(_nothing_matches(selector, [name for name, _ in named]))
    rule_of: dict[str, int] = {}  # the number of the rule by which a module or one around it goes
    chosen: dict[str, tuple[nn.Module, Action]] = {}
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


# -- ruling ---------------------------------------------------------------------------------------


class _Rule:
    """A plan for one module, and the class that the module had."""

    def __init__(self, module: nn.Module, plan: _Plan, placed: Placed) -> None:
        self.base: Any = type(module)
        self.module = weakref.ref(module)
        self.in_force = True  # for those who hold on to a method that they got meanwhile
        self._plan = plan
        self._placed = placed
        self._context_fn: ContextFn | None = selective() if plan.selective else None

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``forward(*args, **kwargs)`` by the rule."""
        if not self.in_force:
            return forward(*args, **kwargs)
        with self._placed(self._plan.placement):
            if not (self._plan.recomputed and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            # As a partial: the module's inputs may have the names of checkpoint's own options.
            function = functools.partial(forward, *args, **kwargs)
            if self._context_fn is None:
                return checkpoint(function)
            return checkpoint(function, context_fn=self._context_fn)


class _Forward:
    """``forward`` of a ruled module. As a data descriptor it stands before a ``forward`` that the
    module has as an attribute of its own, as compiled modules and those hooked by accelerate do,
    and rules that one.
    """

    def __init__(self, rule: _Rule) -> None:
        self._rule = rule
        plain = rule.base.forward

        @functools.wraps(plain)
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            return rule.run(types.MethodType(plain, module), args, kwargs)

        self._method = forward

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        rule = self._rule
        if instance is None:
            return rule.base.forward
        own: Callable[..., Any] | None = instance.__dict__.get("forward")
        ruled = instance is rule.module()
        if own is None:
            return types.MethodType(self._method if ruled else rule.base.forward, instance)
        if not ruled:
            return own

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return rule.run(own, args, kwargs)

        return forward

    def __set__(self, instance: nn.Module, value: object) -> None:
        instance.__dict__["forward"] = value

    def __delete__(self, instance: nn.Module) -> None:
        if "forward" not in instance.__dict__:
            raise AttributeError("forward")
        del instance.__dict__["forward"]


class _Ruled:
    """What the classes of ruled modules have before what the module's own class has."""

    _offload_rule: _Rule

    def __init_subclass__(cls) -> None:
        """Not the base's own, which may keep a list of its subclasses, or want arguments."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the class that the module had."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        ruled, base = type(self), self._offload_rule.base
        if function is copyreg.__newobj__ and arguments == (ruled,):  # type: ignore[attr-defined]
            # The same, but for pickle's insisting on the class that the object is of.
            return (copyreg._reconstructor, (base, object, None), *rest)  # type: ignore[attr-defined]
        arguments = tuple(base if a is ruled else a for a in arguments)
        return (base if function is ruled else function, arguments, *rest)


def _ruled_class(rule: _Rule) -> Any:
    """See Note: a ruled module is of a subclass."""
    base = rule.base
    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_offload_rule": rule,
        "forward": _Forward(rule),
    }
    return type(base)(base.__name__, (_Ruled, base), members)
