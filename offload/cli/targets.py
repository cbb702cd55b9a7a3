"""Targets: the training step that a command is to run, from its name on the command line."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from offload.errors import OffloadError
from offload.workloads import PRESETS, preset

__all__ = ["Target", "TargetError", "load_target", "target_of_workload"]

StepFunction = Callable[[], object]
_FORMS = "module:function, script.py:function, or one of the workloads"


class TargetError(OffloadError, ValueError):
    """The name of a target is wrong, or what it names is no target. Not raised for the errors of
    the user's own code, which may be ValueErrors as well.
    """


@dataclass(frozen=True)
class Target:
    """Something to train one step at a time.

    Attributes:
        name: what it is called in reports.
        step: runs one forward and its backward; called again and again, in no session.
        model: what ``step`` trains, if the target says: rules and plans need it.
    """

    name: str
    step: StepFunction
    model: nn.Module | None = None


def load_target(text: str, *, seed: int = 0) -> Target:
    """The target that ``text`` names.

    Args:
        text: ``"package.module:function"`` or ``"path/to/script.py:function"``: the function is
            called once, without arguments, and returns a step (a callable that runs one forward and
            backward) or a pair ``(model, step)``. Or the name of a workload, see
            ``offload.workloads``.
        seed: of a workload's model and data.

    Raises:
        TargetError: nothing of that name, or it returned something else; the message says the fix.
        Exception, SystemExit: whatever the named code raises itself.

    Example:
        >>> target = load_target("gpt-tiny")
        >>> target.name, type(target.model).__name__
        ('gpt-tiny', 'GPT')
        >>> _ = target.step()
    """
    if text in PRESETS:
        return target_of_workload(text, seed=seed)
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        near = get_close_matches(text, PRESETS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f" ({', '.join(PRESETS)})"
        raise TargetError(f"{text!r} is no target: give {_FORMS}{hint}")
    module = _script(where) if where.endswith(".py") else _module(where)
    function = getattr(module, name, None)
    if function is not None and not callable(function):
        raise TargetError(f"{name!r} of {where!r} is {_described(function)}, no function")
    if function is None:
        functions = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        near = get_close_matches(name, functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise TargetError(f"{where!r} has no function {name!r}{hint}")
    _expect_no_arguments(function, repr(text), "name a function that takes none")
    return _target(text, function())


def target_of_workload(name: str, *, seed: int = 0) -> Target:
    """The workload of this name on one batch of its data, gradients reset before every step.

    Raises:
        ValueError: there is no such workload.
    """
    workload = preset(name)
    model = workload.build(seed)
    (batch,) = workload.batches(1, seed)

    def step() -> object:
        model.zero_grad(set_to_none=True)
        loss = workload.step(model, batch)
        torch.autograd.backward(loss)
        return loss.detach()

    return Target(name, step, model)


def _target(text: str, made: Any) -> Target:
    if isinstance(made, tuple) and len(made) == 2:
        model, step = made
        if isinstance(model, nn.Module) and callable(step):
            return Target(text, _checked(text, step), model)
    elif callable(made) and not isinstance(made, nn.Module):
        return Target(text, _checked(text, made))
    elif inspect.iscoroutine(made):
        made.close()  # else Python warns that nobody waited for it
    raise TargetError(
        f"{text!r} returned {_described(made)}; return a step, a function without arguments that "
        "runs one forward and backward, or a pair (model, step)"
    )


def _checked(text: str, step: StepFunction) -> StepFunction:
    _expect_no_arguments(
        step, f"the step of {text!r}", "bind its data: return lambda: step(batch), for instance"
    )
    return step


def _expect_no_arguments(function: Callable[..., Any], what: str, hint: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of built-in functions there is none
        return
    try:
        signature.bind()
    except TypeError as error:
        raise TargetError(f"{what} cannot be called without arguments, {error}; {hint}") from None


def _described(made: Any) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    kind = type(made).__name__
    return f"a{'n' if kind[0] in 'aeiouAEIO' else ''} {kind}" if made is not None else "None"


def _module(name: str) -> ModuleType:
    if not all(part.isidentifier() for part in name.split(".")):  # ".relative", "a..b"
        raise TargetError(f"{name!r} is no name of a module: give {_FORMS}")
    here = str(Path.cwd())
    if here not in sys.path:  # as with "python -m"; a console script's path lacks it
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            raise TargetError(
                f"there is no module {error.name!r} here or in the environment"
            ) from None
        raise


def _script(path: str) -> ModuleType:
    file = Path(path).expanduser()
    if not file.is_file():
        raise TargetError(f"there is no file {path!r}")
    name = f"offload_target_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # as the name ends in .py
    module = importlib.util.module_from_spec(spec)
    # As for a script that is run: what lies beside it can be imported, and its classes pickled.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        if "relative import" not in str(error):
            raise
        raise TargetError(
            f"{path!r} imports from the package that it is part of: name it as a module of that "
            "package, package.module:function"
        ) from None
    return module
