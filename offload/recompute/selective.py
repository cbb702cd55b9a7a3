"""selective: recompute what is cheap; keep or offload the results of the operations that are not.

Two modes see the operations of a region below autograd: one in the forward puts results into cells,
one in the recomputation takes them from there. What neither concerns runs as it is. Operations that
write to an input, or return a view of one, always run again: they cost nothing to speak of, and a
cell could not stand for them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from offload.hooks.pack import is_of_checkpoint
from offload.recompute.cells import Cells, Draw, random_state
from offload.recompute.checkpoint import ContextFn
from offload.recompute.modes import IGNORED, RegionMode

__all__ = ["Selected", "selective"]

if TYPE_CHECKING:  # older versions of torch cannot subscript these
    Operation = OpOverload[..., Any] | OpOverloadPacket[..., Any] | HigherOrderOperator
PolicyFn = Callable[..., Any]
_aten = torch.ops.aten
_CheckpointPolicy = torch_checkpoint.CheckpointPolicy
_UNSAFE_VIEW = _aten._unsafe_view.default


class _Fate(Enum):
    """What becomes of a result."""

    KEEP = auto()
    OFFLOAD = auto()
    RECOMPUTE = auto()


# Their cost grows faster than their result. What a build of torch lacks is left out.
_EXPENSIVE = (
    "mm", "addmm", "bmm", "baddbmm", "addbmm", "linear", "matmul", "einsum", "_grouped_mm",
    "_scaled_mm", "convolution", "_convolution", "mkldnn_linear", "mkldnn_convolution",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
    "_efficient_attention_forward", "_cudnn_attention_forward",
)  # fmt: skip


def selective(
    policy_fn: PolicyFn | None = None,
    *,
    save: Iterable[Operation] = (),
    offload: Iterable[Operation] | None = None,
    recompute: Iterable[Operation] = (),
) -> ContextFn:
    """A ``context_fn`` for ``checkpoint`` that recomputes only some operations.

    The results of the others are kept on the device, or offloaded: inside a step of a session they
    go through its tiers as saved tensors do, by its policy, and start back before the recomputation
    starts, within ``prefetch_bytes``. Outside a step, and inside another checkpoint, offloading is
    keeping. A result that is modified in place afterwards is recomputed. What an operation in a
    region that ``torch.compile`` traces would offload is saved there, and so meets the session's
    hooks all the same.

    A selective region may take part in several backwards over a retained graph.

    Args:
        policy_fn: decides call by call, in place of the lists: gets what a policy of
            ``torch.utils.checkpoint.create_selective_checkpoint_contexts`` gets, and returns a
            ``CheckpointPolicy`` (``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` offload) or a
            bool.
        save: operations whose results are kept, such as ``torch.ops.aten.mm``; all overloads of it,
            or ``torch.ops.aten.mm.default`` for one.
        offload: operations whose results are offloaded. Default: matrix products, convolutions and
            scaled-dot-product attention, less what the other two lists name.
        recompute: operations to take off the default of ``offload``. What no list names, such as
            norms, activations and dropout, is recomputed.

    Returns:
        The ``context_fn``, for any number of regions. Results after the last tensor that backward
        needs are not held, as no recomputation asks for them.

    Raises:
        TypeError: something in a list is no operation, or ``policy_fn`` cannot be called.
        ValueError: an operation is in two lists, or lists are given beside ``policy_fn``.

    Example:
        >>> import torch, offload
        >>> layer = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU())
        >>> x = torch.randn(128, 64, requires_grad=True)
        >>> with offload.Session(min_offload_bytes=0, keep_last_bytes=0) as session:
        ...     with session.step() as step:
        ...         h = offload.checkpoint(layer, x, context_fn=offload.selective())
        ...         h.sum().backward()
        >>> step.report.offloaded_bytes == 128 * (64 + 256) * 4  # the input, and Linear's result
        True

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022,
    which keeps the products of a transformer layer and recomputes the core of its attention. Here
    the attention is taken to be a fused one, which never holds the scores; where it is written out,
    name its products in ``recompute``.
    """
    if policy_fn is not None:
        if save or offload is not None or recompute:
            raise ValueError("give either a policy_fn or lists of operations, not both")
        if not callable(policy_fn):
            raise TypeError(f"policy_fn is {policy_fn!r}; give a function")
        return functools.partial(_contexts, None, policy_fn)
    kept, again = _overloads("save", save), _overloads("recompute", recompute)
    named = _overloads("offload", offload) if offload is not None else None
    offloaded = named if named is not None else _expensive() - kept - again
    for a, b in ((kept, again), (kept, offloaded), (again, offloaded)):
        if a & b:
            listed = ", ".join(sorted(str(op) for op in a & b))
            raise ValueError(f"{listed}: in two lists; name an operation in one")
    fates = dict.fromkeys(offloaded, _Fate.OFFLOAD) | dict.fromkeys(kept, _Fate.KEEP)
    return functools.partial(_contexts, fates, None)


@functools.cache
def _expensive() -> set[Any]:
    return _overloads("offload", [getattr(_aten, n) for n in _EXPENSIVE if hasattr(_aten, n)])


def _overloads(argument: str, operations: Iterable[Any]) -> set[Any]:
    found: set[Any] = set()
    for operation in operations:
        if isinstance(operation, OpOverloadPacket):
            found.update(getattr(operation, name) for name in operation.overloads())  # type: ignore[no-untyped-call]
        elif isinstance(operation, (OpOverload, HigherOrderOperator)):
            found.add(operation)
        else:
            raise TypeError(
                f"{argument} names {operation!r}, which is no operation of torch: give for example "
                "torch.ops.aten.mm"
            )
    return found


# -- the two modes --------------------------------------------------------------------------------


def _contexts(
    fates: dict[Any, _Fate] | None, policy_fn: PolicyFn | None
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """One for the forward, one for the recomputation."""
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None:
        # A compiler is tracing the region: what torch itself makes marks its graph. What is marked
        # as saved goes through the session's hooks when the compiled code runs.
        policy = functools.partial(_traced, fates, policy_fn)
        made = torch_checkpoint.create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
        return made[0], made[1]
    cells = Cells()
    return _Forward(cells, fates, policy_fn), _Recompute(cells)


def _fate(value: Any) -> _Fate:
    if isinstance(value, bool):
        return _Fate.KEEP if value else _Fate.RECOMPUTE
    if not isinstance(value, _CheckpointPolicy):
        raise TypeError(f"a policy returned {value!r}; return a CheckpointPolicy or a bool")
    if value.name.endswith("_CPU_OFFLOAD"):
        return _Fate.OFFLOAD
    return _Fate.KEEP if value.name.endswith("_SAVE") else _Fate.RECOMPUTE


def _traced(
    fates: dict[Any, _Fate] | None, policy_fn: PolicyFn | None, ctx: Any, op: Any, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    if fates is not None:
        fate = fates.get(op, _Fate.RECOMPUTE)
    else:
        assert policy_fn is not None
        fate = _fate(policy_fn(ctx, op, *args, **kwargs))
    recomputed = fate is _Fate.RECOMPUTE
    return _CheckpointPolicy.PREFER_RECOMPUTE if recomputed else _CheckpointPolicy.MUST_SAVE


class _Forward(RegionMode):  # type: ignore[no-untyped-call]
    """Puts results into cells."""

    def __init__(
        self, cells: Cells, fates: dict[Any, _Fate] | None, policy_fn: PolicyFn | None
    ) -> None:
        super().__init__()
        self._cells = cells
        self._fates = fates
        self._policy_fn = policy_fn
        self._counting: saved_tensors_hooks | None = None

    def __enter__(self) -> Any:
        pair = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if is_of_checkpoint(pair):
            self._counting = saved_tensors_hooks(*self._cells.counted(pair))
            self._counting.__enter__()
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        counting, self._counting = self._counting, None
        if counting is not None:
            counting.__exit__(*exc)
        self._cells.close()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in IGNORED:
            return func(*args, **kwargs)
        if not _replaceable(func):
            result = func(*args, **kwargs)
            for written in _written(func, args, kwargs):
                self._cells.written(written)
            if func is _UNSAFE_VIEW:
                self._cells.aliased(args[0], result)
            return result
        known = self._fates is None or func in self._fates
        if not known or self.is_inside_backward():
            return func(*args, **kwargs)
        device = _generator_of(func, args)
        before = random_state(device) if device is not None else None
        result = func(*args, **kwargs)
        fate = self._fate_of(func, result, args, kwargs)
        if fate is _Fate.RECOMPUTE:
            self._cells.skip(func)
        else:
            draw = Draw.of(device, before) if device is not None and before is not None else None
            self._cells.add(func, result, draw, offload=fate is _Fate.OFFLOAD)
        return result

    def _fate_of(
        self, func: Any, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> _Fate:
        if self._fates is not None:
            return self._fates[func]
        assert self._policy_fn is not None
        context = torch_checkpoint.SelectiveCheckpointContext(is_recompute=False, op_output=result)
        return _fate(self._policy_fn(context, func, *args, **kwargs))


class Selected(RegionMode):  # type: ignore[no-untyped-call]
    """Tells which results of a region ``selective()`` would hold, if nothing writes to them.

    Args:
        tell: is called with each.
    """

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _expensive() and _replaceable(func) and not self.is_inside_backward():
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self._tell(leaf)
        return result


class _Recompute(RegionMode):  # type: ignore[no-untyped-call]
    """Takes results from cells."""

    def __init__(self, cells: Cells) -> None:
        super().__init__()
        self._cells = cells
        self._calls: defaultdict[Any, int] = defaultdict(int)

    def __enter__(self) -> Any:
        self._calls.clear()  # it may be entered again, for a retained graph
        self._cells.recall()
        return super().__enter__()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in IGNORED and not self.is_inside_backward():
            index = self._calls[func]
            self._calls[func] += 1
            call = self._cells.find(func, index)
            if call is not None:
                return call.result()
        return func(*args, **(kwargs or {}))


@functools.cache
def _replaceable(operation: Any) -> bool:
    """Whether its result is its own: it writes to no input, and returns a view of none."""
    if operation is _UNSAFE_VIEW:
        return False
    schema = getattr(operation, "_schema", None)
    if schema is None:  # a higher-order operator: nothing of the kind is known of it
        return True
    return not schema.is_mutable and all(r.alias_info is None for r in schema.returns)


@functools.cache
def _writes(operation: Any) -> tuple[tuple[int, str], ...]:
    return tuple(
        (i, argument.name)
        for i, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _written(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The inputs that an operation writes to."""
    given = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(operation)]
    return pytree.tree_leaves(given) if given else given


def _generator_of(operation: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Where it may draw random numbers."""
    if torch.Tag.nondeterministic_seeded not in getattr(operation, "tags", ()):
        return None
    return next((a.device for a in args if isinstance(a, Tensor)), None)
