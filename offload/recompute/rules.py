"""Rules: which modules of a model keep, offload or recompute their activations.

[Note: a ruled module is of a subclass] While a rule applies, the module's class is a subclass of
the one it had, as FSDP2 and ``torch.nn.utils.parametrize`` do it. The module itself is not touched:
an attribute would be pickled, and in a copy would still call the module it was made for; a hook
cannot put a recomputation around ``forward``. The subclass has the same name and gives copies and
pickles the class as it was. All ruled modules that had one class share one subclass, or a compiler
would compile for each; other instances that come to be of it are not ruled.

[Note: compiled code is inside] Of a module that was compiled in place, by ``module.compile()``, the
rule is around what was compiled, and so around the module's hooks. Around ``forward`` it would be
inside, where a compiler cannot follow it and would give up the whole module.
"""

from __future__ import annotations

import copyreg
import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._dynamo import OptimizedModule

from offload.blocks.placement import Placement
from offload.errors import StateError, warn_user
from offload.recompute.caches import run_twice
from offload.recompute.checkpoint import ContextFn, checkpoint
from offload.recompute.selective import selective
from offload.recompute.selectors import Selector, choose
from offload.report.scopes import expect_model

__all__ = [
    "WAYS", "Action", "Applied", "Rule", "Rules", "apply_rules", "check_unruled", "once",
    "recomputed",
]  # fmt: skip


class Action(Enum):
    """What becomes of the activations of a module's forward.

    ``KEEP``, ``HOST``, ``DISK``: saved there, on the device, in host memory or on the disk,
    whatever the session's policy says. ``RECOMPUTE``: given up and computed again, from inputs that
    are kept on the device, in host memory (``RECOMPUTE_HOST``) or on the disk (``RECOMPUTE_DISK``).
    ``SELECTIVE``: only what is cheap is computed again, see ``offload.selective``; its inputs and
    the results of the others go where the session's policy says, or stay (``SELECTIVE_KEEP``), or
    go to host memory (``SELECTIVE_HOST``) or the disk (``SELECTIVE_DISK``).

    Example:
        >>> Action.of("recompute+disk")
        <Action.RECOMPUTE_DISK: 'recompute+disk'>
        >>> [action.value for action in Action if action.value.startswith("selective+")]
        ['selective+keep', 'selective+host', 'selective+disk']
    """

    KEEP = "keep"
    HOST = "host"
    DISK = "disk"
    RECOMPUTE = "recompute"
    RECOMPUTE_HOST = "recompute+host"
    RECOMPUTE_DISK = "recompute+disk"
    SELECTIVE = "selective"
    SELECTIVE_KEEP = "selective+keep"
    SELECTIVE_HOST = "selective+host"
    SELECTIVE_DISK = "selective+disk"

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


class Way(NamedTuple):
    """How an action is carried out."""

    placement: Placement | None  # of what is saved, or of the inputs; None: as the policy says
    recomputed: bool
    selective: bool = False


WAYS = {
    Action.KEEP: Way(Placement.KEEP, False),
    Action.HOST: Way(Placement.HOST, False),
    Action.DISK: Way(Placement.DISK, False),
    Action.RECOMPUTE: Way(Placement.KEEP, True),
    Action.RECOMPUTE_HOST: Way(Placement.HOST, True),
    Action.RECOMPUTE_DISK: Way(Placement.DISK, True),
    Action.SELECTIVE: Way(None, True, selective=True),
    Action.SELECTIVE_KEEP: Way(Placement.KEEP, True, selective=True),
    Action.SELECTIVE_HOST: Way(Placement.HOST, True, selective=True),
    Action.SELECTIVE_DISK: Way(Placement.DISK, True, selective=True),
}
Placed = Callable[[Placement | None], AbstractContextManager[None]]
Rules = Mapping[Selector, Action | str] | Iterable[tuple[Selector, Action | str]]


def apply_rules(model: nn.Module, rules: Rules, placed: Placed) -> Applied:
    """``Session.apply``; ``placed`` makes the context in which saved tensors get a placement."""
    expect_model(model)
    if not isinstance(rules, Iterable):
        raise TypeError(f'rules are {rules!r}; give "auto", a Plan, or a mapping of rules')
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules)
    chosen = choose(model, [(selector, Action.of(action)) for selector, action in pairs])
    check_unruled(chosen)
    broken = [n for n, (m, _) in chosen.items() if m is not model and not _is_compiled(m)]
    if broken and _is_compiled(model):
        warn_user(
            f"module {broken[0]!r} and {len(broken) - 1} more that are ruled are inside a compiled "
            "model: its graph ends at each of them, and what is recomputed is not compiled. "
            "Compile the ruled modules instead, by module.compile()"
        )
    tell = once()
    return Applied(chosen, lambda _, module, action: Rule(module, action, placed, tell))


def once() -> Callable[[str], None]:
    """Warns, if it has not before: of many modules one is enough."""
    told: list[str] = []

    def tell(message: str) -> None:
        if not told:
            told.append(message)
            warn_user(message)

    return tell


def check_unruled(chosen: Mapping[str, tuple[nn.Module, Action]]) -> None:
    """Raise if a module cannot be ruled, or is already."""
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


class Applied:
    """Rules in force, from ``Session.apply`` on until ``remove()`` or the end of the context.

    Attributes:
        actions: by name, what was chosen for each module that is ruled.
    """

    def __init__(
        self,
        chosen: Mapping[str, tuple[nn.Module, Action]],
        make_rule: Callable[[str, nn.Module, Action], Rule],
    ) -> None:
        self.actions = {name: action for name, (_, action) in chosen.items()}
        self._ruled: list[tuple[nn.Module, Rule]] = []
        try:
            for name, (module, action) in chosen.items():
                self._ruled.append((module, make_rule(name, module, action)))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Make every module what it was. May be called twice."""
        while self._ruled:
            module, rule = self._ruled.pop()
            rule.lift(module)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        listed = ", ".join(f"{name!r}: {action.value!r}" for name, action in self.actions.items())
        return f"<{type(self).__name__} {{{listed}}}>"


def _is_compiled_in_place(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _is_compiled(module: nn.Module) -> bool:
    return _is_compiled_in_place(module) or isinstance(module, OptimizedModule)


# -- ruling ---------------------------------------------------------------------------------------


class Rule:
    """An action for one module, and the class that the module had."""

    def __init__(
        self, module: nn.Module, action: Action, placed: Placed, tell: Callable[[str], None]
    ) -> None:
        self.tell = tell
        self._base: Any = type(module)
        self._ruled: Any = None  # the class meanwhile
        self.in_force = True  # for those who hold on to a method that they got meanwhile
        self._way = WAYS[action]
        self._placed = placed
        self._context_fn: ContextFn | None = selective() if self._way.selective else None
        self.enforce(module)

    def enforce(self, module: nn.Module) -> None:
        """Give the module the class that it needs, by what it is now."""
        self._ruled = _ruled_class(self._base, _is_compiled_in_place(module))
        module.__class__ = self._ruled
        _rule_of[module] = self

    def lift(self, module: nn.Module) -> None:
        """Make the module what it was."""
        self.in_force = False
        _rule_of.pop(module, None)
        if type(module) is self._ruled:  # somebody may have put a class of theirs above it
            module.__class__ = self._base

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """``forward(*args, **kwargs)`` by the rule."""
        if not self.in_force:
            return forward(*args, **kwargs)
        with self._placed(self._way.placement):
            if not (self._way.recomputed and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            module: Any = forward
            forward, args, kwargs = run_twice(module.__self__, forward, args, kwargs, self.tell)
            return recomputed(forward, args, kwargs, self._context_fn)


def recomputed(
    forward: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: ContextFn | None,
) -> Any:
    """``forward(*args, **kwargs)``, checkpointed."""
    # As a partial: the module's inputs may have the names of checkpoint's own options.
    function = functools.partial(forward, *args, **kwargs)
    if context_fn is None:
        return checkpoint(function)
    return checkpoint(function, context_fn=context_fn)


_rule_of: weakref.WeakKeyDictionary[nn.Module, Rule] = weakref.WeakKeyDictionary()


class _Forward:
    """``forward`` of ruled modules. As a data descriptor it stands before a ``forward`` that a
    module has as an attribute of its own, as compiled modules and those hooked by accelerate do,
    and rules that one.
    """

    def __init__(self, base: Any) -> None:
        self._base = base
        plain = base.forward

        @functools.wraps(plain)
        def forward(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            rule = _rule_of.get(module)
            bound = types.MethodType(plain, module)
            return bound(*args, **kwargs) if rule is None else rule.run(bound, args, kwargs)

        self._method = forward

    def __get__(self, instance: nn.Module | None, owner: type) -> Any:
        if instance is None:
            return self._base.forward
        rule = _rule_of.get(instance)
        own: Callable[..., Any] | None = instance.__dict__.get("forward")
        if own is None:
            return types.MethodType(self._base.forward if rule is None else self._method, instance)
        if rule is None:
            return own

        # A method of the module, as which it tells whose normalisations it may move.
        bound = types.MethodType(lambda _, /, *args, **kwargs: own(*args, **kwargs), instance)

        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return rule.run(bound, args, kwargs)

        return forward

    def __set__(self, instance: nn.Module, value: object) -> None:
        instance.__dict__["forward"] = value

    def __delete__(self, instance: nn.Module) -> None:
        if "forward" not in instance.__dict__:
            raise AttributeError("forward")
        del instance.__dict__["forward"]


class _Ruled:
    """What the classes of ruled modules have before what the module's own class has."""

    _offload_base: Any
    _offload_compiled: bool

    def __init_subclass__(cls) -> None:
        """Not the base's own, which may keep a list of its subclasses, or want arguments."""

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As of any module; the rule goes around it."""
        super().compile(*args, **kwargs)  # type: ignore[misc]
        module: Any = self
        if module in _rule_of:
            _rule_of[module].enforce(module)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles are of the class that the module had."""
        reduced = super().__reduce_ex__(protocol)
        if not isinstance(reduced, tuple):
            return reduced
        function, arguments, *rest = reduced
        ruled, base = type(self), self._offload_base
        if function is copyreg.__newobj__ and arguments == (ruled,):  # type: ignore[attr-defined]
            # The same, but for pickle's insisting on the class that the object is of.
            return (copyreg._reconstructor, (base, object, None), *rest)  # type: ignore[attr-defined]
        arguments = tuple(base if a is ruled else a for a in arguments)
        return (base if function is ruled else function, arguments, *rest)


def _ruled_class(base: Any, compiled: bool) -> Any:
    """See Note: a ruled module is of a subclass."""
    for known in type.__subclasses__(base):
        if known.__dict__.get("_offload_base") is base and known._offload_compiled is compiled:
            return known

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        rule = _rule_of.get(module)
        bound = types.MethodType(base.__call__, module)
        return bound(*args, **kwargs) if rule is None else rule.run(bound, args, kwargs)

    members = {
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "_offload_base": base,
        "_offload_compiled": compiled,
        # See Note: compiled code is inside.
        **({"__call__": call} if compiled else {"forward": _Forward(base)}),
    }
    return type(base)(base.__name__, (_Ruled, base), members)
