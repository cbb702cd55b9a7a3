"""Which modules of a model are its segments, found from the shape of its tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn

from offload.errors import SegmentError

__all__ = ["find_segments", "repeated_blocks"]

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def find_segments(model: nn.Module, wanted: Sequence[str] | None = None) -> list[str]:
    """Names of the modules that a plan decides about, in the order of the tree.

    Its repeated blocks. A model without any is divided into the parts of its longest list or
    sequence, or into its own children.

    Args:
        model: the model.
        wanted: names of modules, to be used in place of what would be found.

    Raises:
        SegmentError: the model has no parts, or none of a wanted name.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> find_segments(nn.Sequential(nn.Embedding(9, 8), nn.ModuleList([block(), block()])))
        ['1.0', '1.1']
        >>> find_segments(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)))
        ['0', '1', '2']
    """
    if wanted is not None:
        return _checked(model, wanted)
    found = repeated_blocks(model) or _parts(model)
    if not found:
        raise SegmentError(
            f"{type(model).__name__} has no parts to plan for: name its segments "
            "(segments=['layers.0', ...]), or divide its forward into modules"
        )
    return found


def repeated_blocks(model: nn.Module) -> list[str]:
    """Names of the layers that a model is a stack, or several stacks, of.

    Two or more children of one class in a list, sequence or dictionary of modules, which have
    children of their own. Where such blocks are made of such blocks, the inner ones.

    Example:
        >>> block = lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> stack = lambda: nn.ModuleList([block(), block()])
        >>> repeated_blocks(nn.ModuleDict({"down": stack(), "up": stack(), "head": block()}))
        ['down.0', 'down.1', 'up.0', 'up.1']
        >>> repeated_blocks(block())
        []
    """
    repeated = [n for container, n in _children(model) if n in _repeated(container)]
    return [n for n in repeated if not any(o.startswith(n + ".") for o in repeated)]


def _children(model: nn.Module) -> Iterable[tuple[tuple[str, nn.Module], str]]:
    for name, module in model.named_modules():
        if isinstance(module, _CONTAINERS):
            for child, _ in module.named_children():
                yield (name, module), f"{name}.{child}" if name else child


def _repeated(container: tuple[str, nn.Module]) -> set[str]:
    """Names of the children that are repeated blocks."""
    name, module = container
    blocks = [(n, c) for n, c in module.named_children() if _is_block(c)]
    counts = Counter(_kind(c) for _, c in blocks)
    return {f"{name}.{n}" if name else n for n, c in blocks if counts[_kind(c)] > 1}


def _kind(module: nn.Module) -> tuple[str, str]:
    """Its class by name: a ruled module is of a subclass of that name."""
    return type(module).__module__, type(module).__qualname__


def _is_block(module: nn.Module) -> bool:
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict))
    return not is_list and any(True for _ in module.children())


def _parts(model: nn.Module) -> list[str]:
    """Of the longest list or sequence, or of the model itself."""
    containers = [(n, m) for n, m in model.named_modules() if isinstance(m, _CONTAINERS)]
    name, holder = max(containers, key=lambda c: len(list(c[1].children())), default=("", model))
    if len(list(holder.children())) < 2:
        name, holder = "", model
    return [
        f"{name}.{n}" if name else n
        for n, c in holder.named_children()
        if not isinstance(c, (nn.ModuleList, nn.ModuleDict))
    ]


def _checked(model: nn.Module, wanted: Sequence[str]) -> list[str]:
    order = {name: i for i, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    for name in wanted:
        if name not in order or not name:
            listed = ", ".join(repr(n) for n in list(order)[1:6])
            raise SegmentError(f"the model has no module {name!r} inside; it has {listed}...")
        outer = [o for o in wanted if name.startswith(o + ".")]
        if outer:
            raise SegmentError(
                f"segment {name!r} lies inside segment {outer[0]!r}: name one of them"
            )
    return sorted(set(wanted), key=order.__getitem__)
