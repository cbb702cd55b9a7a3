"""Scopes: which module of a model runs its forward now, on each thread. Only where one is watched.

Hooks of the modules tell; a model that is not watched pays nothing. What autograd saves meanwhile
is then known by the innermost module, and each forward becomes an event of the trace.
"""

import threading
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from offload.report.trace import Subject, Trace, now_ns


class _Running(threading.local):
    """The modules that a thread is in, outermost first, and since when."""

    def __init__(self) -> None:
        self.stack: list[tuple[str, int]] = []


class Scopes:
    """The watched models of one session."""

    def __init__(self, trace: Trace) -> None:
        self.active = 0  # models that are watched
        self._trace = trace
        self._running = _Running()

    @property
    def module(self) -> str:
        """The name of the innermost module whose forward this thread is in, or nothing."""
        stack = self._running.stack
        return stack[-1][0] if stack else ""

    def forget(self) -> None:
        """Be in no module: a forward that was left by an exception may not have said so."""
        self._running.stack.clear()

    def watch(self, model: torch.nn.Module) -> "Watching":
        """Follow the forwards of ``model`` until ``remove()`` is called on the result."""
        return Watching(self, model)

    def _enter(self, name: str) -> None:
        self._running.stack.append((name, now_ns()))

    def _leave(self, name: str) -> None:
        stack = self._running.stack
        while stack:
            found, start_ns = stack.pop()
            if found == name:
                self._trace.emit("module", -1, 0, start_ns, now_ns(), Subject(module=name))
                return


def expect_model(model: object) -> None:
    """Raise ``TypeError`` if it is none."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is {type(model).__name__}; give a torch.nn.Module")


class Watching:
    """A model that is watched: a context manager, also ended by ``remove()``."""

    def __init__(self, scopes: Scopes, model: torch.nn.Module) -> None:
        self._scopes = scopes
        expect_model(model)
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # takes no hooks of ours; what it saves is known by the module around it
            self._follow(name or type(model).__name__, module)
        scopes.active += 1

    def _follow(self, name: str, module: torch.nn.Module) -> None:
        scopes = self._scopes

        def entered(*_: Any) -> None:
            scopes._enter(name)

        def left(*_: Any) -> None:
            scopes._leave(name)

        self._handles += [
            module.register_forward_pre_hook(entered, prepend=True),
            module.register_forward_hook(left, always_call=True),
        ]

    def remove(self) -> None:
        """Watch no longer. May be called twice."""
        if self._handles:
            self._scopes.active -= 1
        while self._handles:
            self._handles.pop().remove()

    def __enter__(self) -> "Watching":
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()
