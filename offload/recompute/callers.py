"""Which modules are being called, and how they are named.

[Note: modules are found on the stack] Every call of a module goes through one function of torch's,
whose frames therefore tell in which modules an operation runs. Hooks on modules would say it too,
but are seen by every thread and by compilers, which compile again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any

from torch import nn

from offload.recompute.regions import Region

__all__ = ["Names", "innermost", "outermost"]

_MODULE_CALL = nn.Module._call_impl.__code__
_REGION_CALL = Region.__call__.__code__


class Names:
    """Of modules within the outermost ones; several of those of one class are numbered."""

    def __init__(self) -> None:
        self._labels: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._counts: dict[str, int] = {}
        self._paths: weakref.WeakKeyDictionary[
            nn.Module, weakref.WeakKeyDictionary[nn.Module, str]
        ] = weakref.WeakKeyDictionary()

    def of(self, root: nn.Module, module: nn.Module) -> str:
        """The class of ``root``, and the name of ``module`` in it."""
        path = self._path(root, module)
        if path is None:  # it is not part of it
            root, path = module, ""
        return f"{self._label(root)}.{path}" if path else self._label(root)

    def _label(self, root: nn.Module) -> str:
        if root not in self._labels:
            name = type(root).__name__
            count = self._counts[name] = self._counts.get(name, 0) + 1
            self._labels[root] = name if count == 1 else f"{name}#{count}"
        return self._labels[root]

    def _path(self, root: nn.Module, module: nn.Module) -> str | None:
        paths = self._paths.get(root)
        if paths is None or module not in paths:  # it may be new
            named = {child: name for name, child in root.named_modules()}
            paths = self._paths[root] = weakref.WeakKeyDictionary(named)
        return paths.get(module)


def _calls(frame: FrameType | None, region: Region[Any] | None) -> Iterator[nn.Module]:
    """From the inside out, the modules that are being called, as far as ``region``."""
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            yield frame.f_locals["self"]
        elif frame.f_code is _REGION_CALL and frame.f_locals["self"] is region:
            return
        frame = frame.f_back


def innermost(frame: FrameType, region: Region[Any]) -> nn.Module | None:
    """The module that runs in ``frame``, a call of ``region``."""
    return next(_calls(frame, region), None)


def outermost(frame: FrameType, region: Region[Any] | None) -> nn.Module | None:
    """The first that was called, in ``region`` if one is given."""
    found = None
    for module in _calls(frame, region):
        found = module
    return found
