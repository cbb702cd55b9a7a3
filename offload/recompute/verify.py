"""Verifier: whether recomputations give the values that the forward had.

One mode copies the result of every operation of a region's forward, one compares the operations of
its recomputation with the copies, in the order in which they ran. The copies are saved as the
tensors of the region would have been: inside a step of a session they wait on its tiers.

[Note: what is not compared] A view computes nothing. Memory that was not written yet has no value.
Running statistics of normalisations are moved in the forward and put aside in the recomputation. A
parameter that autocast casts in a recomputation may have been cast before the region in the
forward. A backward inside the region has a recomputation of its own.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from offload.errors import warn_user
from offload.hooks.pack import is_of_checkpoint
from offload.recompute.callers import Names, innermost, outermost
from offload.recompute.drift import ModuleDrift, RecomputeReport, difference, report_of
from offload.recompute.modes import IGNORED, RegionMode
from offload.recompute.regions import Region
from offload.recompute.statistics import is_statistic

__all__ = ["Verifier", "current_verifier"]

_aten = torch.ops.aten
_UNWRITTEN = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_",
              "empty_permuted", "empty_quantized")  # fmt: skip
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
_Saved = tuple[Any, Callable[[Any], Tensor] | None]  # packed, and what unpacks it


class _Active(threading.local):
    def __init__(self) -> None:
        self.verifiers: list[Verifier] = []


_active = _Active()


def current_verifier() -> Verifier | None:
    """Of this thread, if there is one."""
    return _active.verifiers[-1] if _active.verifiers else None


class Verifier:
    """Compares what ``checkpoint``, ``checkpoint_sequential`` and rules recompute with what the
    forward had: in regions whose forward runs in its context, on the thread that entered it.

    To find out why gradients differ, not to train with: the result of every operation is copied,
    and waits for its recomputation where a saved tensor would, inside a step of a session on its
    tiers. What is computed stays the same. Regions with ``debug=True``, regions inside compiled
    code, and ``torch.utils.checkpoint`` are not looked at.

    If anything differs a warning names the first module that is not deterministic, at the end of
    the context or of the first backward after it. May be entered again, and in several threads.

    Example:
        >>> import torch, offload
        >>> x = torch.ones(3, requires_grad=True)
        >>> with Verifier() as verifier:
        ...     offload.checkpoint(torch.nn.Dropout(0.5), x).sum().backward()
        >>> verifier.report().drifted
        False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions = 0
        self._recomputations = 0
        self._modules: dict[str, _Module] = {}
        self._names = Names()
        self._open: list[int] = []  # contexts, by the threads that entered them
        self._warned = False

    def __enter__(self) -> Verifier:
        self._open.append(threading.get_ident())
        _active.verifiers.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        """May be called again, or without an entry, where an interrupt came in between."""
        thread, active = threading.get_ident(), _active.verifiers
        if self in active:
            active.remove(self)
        while self._open.count(thread) > active.count(self):
            self._open.remove(thread)
        self._warn()

    def report(self) -> RecomputeReport:
        """What was found so far."""
        with self._lock:
            listed = sorted(self._modules.items(), key=lambda item: item[1].reached)
            drifts = [(module.astray, module.drift(name)) for name, module in listed]
            return report_of(self._regions, self._recomputations, drifts)

    def contexts(self, region: Region[Any], context_fn: Callable[[], Contexts]) -> Contexts:
        """``context_fn()``, with what compares inside of it."""
        around = context_fn()
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
            return around  # a compiler traces the region
        with self._lock:
            number = self._regions
            self._regions += 1
        watched = _Watched(self, region, number)
        return _Both(around[0], _Forward(watched)), _Both(around[1], _Recompute(watched))

    def compared(
        self, name: str, at: tuple[int, int], off: tuple[float, float], operation: str | None
    ) -> None:
        """One result of the module ``name``, the ``at``-th; ``operation`` if it began to differ."""
        with self._lock:
            module = self._modules.setdefault(name, _Module(at))
            module.add(at, off, operation)

    def recomputed(self) -> None:
        """One more time."""
        with self._lock:
            self._recomputations += 1
        self._warn()

    def name(self, root: torch.nn.Module, module: torch.nn.Module) -> str:
        """How ``module`` is called in reports."""
        with self._lock:
            return self._names.of(root, module)

    def _warn(self) -> None:
        if self._warned or self._open:  # at the end, or when a backward comes later
            return
        report = self.report()
        if report.drifted:
            self._warned = True
            warn_user(_warning(report))


def _warning(report: RecomputeReport) -> str:
    drifts = [m for m in report.modules if m.different]
    first = next((m for m in drifts if m.module == report.first), drifts[0])
    return (
        f"a recomputation gave other values than its forward, first in {first.module} "
        f"({first.operation}): largest difference {first.max_abs:.3g}, {first.max_rel:.3g} of the "
        f"largest value; {len(drifts)} of {len(report.modules)} modules differ. Gradients may be "
        "wrong. Let it draw from torch's default generators, which are put back, and change no "
        "state in its forward (a cache, a counter); or do not recompute it"
    )


class _Module:
    """What is known of one module so far."""

    def __init__(self, reached: tuple[int, int]) -> None:
        self.reached = reached
        self.astray: tuple[int, int] | None = None  # where it began to differ by itself
        self._operation: str | None = None
        self._results = self._different = 0
        self._max_abs = self._max_rel = 0.0

    def add(self, at: tuple[int, int], off: tuple[float, float], operation: str | None) -> None:
        self.reached = min(self.reached, at)
        self._results += 1
        self._different += off[0] > 0
        self._max_abs = max(self._max_abs, off[0])
        self._max_rel = max(self._max_rel, off[1])
        if operation is not None and (self.astray is None or at < self.astray):
            self.astray, self._operation = at, operation

    def drift(self, name: str) -> ModuleDrift:
        numbers = (self._results, self._different, self._max_abs, self._max_rel)
        return ModuleDrift(name, *numbers, self._operation)


# -- one region -----------------------------------------------------------------------------------


class _Both:
    """Two contexts in one, that may be entered several times."""

    def __init__(self, outer: AbstractContextManager[Any], inner: TorchDispatchMode) -> None:
        self._outer = outer
        self._inner = inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *exc: Any) -> Any:
        self._inner.__exit__(*exc)  # type: ignore[no-untyped-call]
        return self._outer.__exit__(*exc)


class _Watched:
    """A region and the results of its forward."""

    def __init__(self, verifier: Verifier, region: Region[Any], number: int) -> None:
        self.verifier = verifier
        self.region = region
        self.number = number
        self.results: list[tuple[Any, list[_Saved]]] = []  # operations and what they gave
        pair = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self._pair = None if is_of_checkpoint(pair) else pair  # else it is inside another region
        self._model = outermost(sys._getframe(1), None)
        # Numbered now, in the order of the forward; names are asked for in that of backward.
        for module in region.modules if self._model is None else [self._model]:
            verifier.name(module, module)

    def save(self, operation: Any, results: list[Tensor]) -> None:
        copies: list[Tensor] = [result.detach().clone() for result in results]
        if self._pair is None:
            self.results.append((operation, [(copy, None) for copy in copies]))
        else:
            pack, unpack = self._pair
            self.results.append((operation, [(pack(copy), unpack) for copy in copies]))

    def name(self) -> str:
        """Of the module that runs an operation now."""
        frame = sys._getframe(1)
        module = innermost(frame, self.region)
        own = self.region.modules
        if module is None and own:
            module = own[0]
        if module is None:
            return self.region.name
        root = self._model or outermost(frame, self.region) or module
        return self.verifier.name(root, module)


class _Mode(RegionMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a region whose results are compared."""

    def __init__(self, watched: _Watched) -> None:
        super().__init__()
        self._watched = watched

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        # See Note: what is not compared.
        if (
            func not in IGNORED
            and _computes(func)
            and not self.is_inside_backward()
            and not _is_cast_of_leaf(func, args)
            and not (args and is_statistic(args[0], self._watched.region.modules))
        ):
            results = _values(result)
            if results:
                # Modes around this one see what the region does, and not what is done here.
                with _disable_current_modes(), torch.no_grad():
                    self.see(func, args, results)
        return result

    def see(self, operation: Any, args: tuple[Any, ...], results: list[Tensor]) -> None:
        raise NotImplementedError


class _Forward(_Mode):  # type: ignore[no-untyped-call]
    """Copies results."""

    def see(self, operation: Any, args: tuple[Any, ...], results: list[Tensor]) -> None:
        self._watched.save(operation, results)


class _Recompute(_Mode):  # type: ignore[no-untyped-call]
    """Compares them."""

    def __enter__(self) -> Any:
        self._next = 0  # it may be entered again, for a retained graph
        self._lost = False
        # The storages of results that differ, alive or dead: an address is not used again.
        self._differing: dict[int, Any] = {}
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._differing.clear()
        self._watched.verifier.recomputed()

    def see(self, operation: Any, args: tuple[Any, ...], results: list[Tensor]) -> None:
        index = self._next
        self._next += 1
        if self._lost or index >= len(self._watched.results):
            return
        expected, saved = self._watched.results[index]
        infinite = (float("inf"), float("inf"))
        if expected is not operation or len(saved) != len(results):
            self._lost = True  # it went another way, and there is nothing to compare with
            self._tell(index, infinite, f"{operation} instead of {expected}")
            return
        consequence = any(self._differs(leaf) for leaf in pytree.tree_leaves(args))
        for (packed, unpack), got in zip(saved, results, strict=True):
            off = difference(packed if unpack is None else unpack(packed), got)
            if off[0] > 0:
                storage = got.untyped_storage()
                self._differing[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._tell(index, off, str(operation) if off[0] > 0 and not consequence else None)

    def _tell(self, index: int, off: tuple[float, float], operation: str | None) -> None:
        watched = self._watched
        watched.verifier.compared(watched.name(), (watched.number, index), off, operation)

    def _differs(self, leaf: object) -> bool:
        if not self._differing or not isinstance(leaf, Tensor):
            return False
        return leaf.untyped_storage()._cdata in self._differing


@functools.cache
def _computes(operation: Any) -> bool:
    schema = getattr(operation, "_schema", None)
    if schema is None:  # a higher-order operator
        return True
    if schema.name.partition("::")[2] in _UNWRITTEN:
        return False
    return any(r.alias_info is None or r.alias_info.is_write for r in schema.returns)


def _is_cast_of_leaf(operation: Any, args: tuple[Any, ...]) -> bool:
    return operation is _aten._to_copy.default and args[0].is_leaf and args[0].requires_grad


def _values(result: Any) -> list[Tensor]:
    """The tensors of a result that have values to compare."""
    if isinstance(result, Tensor):
        return [result] if _has_values(result) else []
    leaves = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
    # Bytes beside another result are working memory for the operation's backward.
    return [
        t for i, t in enumerate(leaves) if _has_values(t) and not (i and t.dtype is torch.uint8)
    ]


def _has_values(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested
