"""What tensor parallelism saves: wrappers without bytes of their own, around the part of a tensor
that this rank holds.

A ``DTensor`` says how a tensor is spread over the ranks; an ``AsyncCollectiveTensor`` is what a
collective returns before it has ended. The plain tensor within can leave like any other, and the
wrapper waits, emptied, to be put around it again.
"""

import sys

import torch

from offload.tensors.layout import TensorLayout
from offload.tensors.weak import modified_in_place

_MODULES = {  # where each kind is defined, and what it calls the tensor within
    "DTensor": ("torch.distributed.tensor", "_local_tensor"),
    "AsyncCollectiveTensor": ("torch.distributed._functional_collectives", "elem"),
}


def _name_of_part(tensor: torch.Tensor) -> str | None:
    module, attribute = _MODULES.get(type(tensor).__name__, ("", ""))
    # Not imported: that takes a second, and who has a tensor of this kind has done so.
    kind = getattr(sys.modules.get(module), type(tensor).__name__, None)
    return attribute if type(tensor) is kind else None


def part_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor within; ``None`` where ``tensor`` is none of these wrappers.

    A collective that has not ended is waited for: the operation that saves its result is about to
    compute with it, and would wait the next moment. On an accelerator the host does not wait.
    """
    attribute = _name_of_part(tensor)
    if attribute is None:
        return None
    if attribute == "elem":
        return tensor.trigger_wait()  # type: ignore[attr-defined, no-any-return]
    part: torch.Tensor = getattr(tensor, attribute)
    return part if type(part) is torch.Tensor else part_of(part)


class Wrapper:
    """A saved wrapper, emptied.

    Args:
        tensor: the wrapper, of which ``part_of`` gave the plain tensor within.
        packed: what that tensor was packed to.
    """

    __slots__ = ("_empty", "_version", "packed")

    def __init__(self, tensor: torch.Tensor, packed: object) -> None:
        self.packed = packed
        self._version = tensor._version
        self._empty = tensor.detach()  # shares the version counter
        _fill(self._empty, torch.empty(0, dtype=tensor.dtype, device=tensor.device))

    def around(self, part: torch.Tensor) -> torch.Tensor:
        """The saved tensor again, with ``part`` within.

        Raises:
            ModifiedInPlaceError: it was modified since it was saved.
        """
        if self._empty._version != self._version:
            layout = TensorLayout.of(self._empty)
            raise modified_in_place(layout, self._empty._version, self._version)
        tensor = self._empty.detach()
        _fill(tensor, part)
        return tensor


def _fill(tensor: torch.Tensor, part: torch.Tensor) -> None:
    attribute = _name_of_part(tensor)
    assert attribute is not None
    setattr(tensor, attribute, part)
    if attribute == "elem":
        tensor.completed = True  # type: ignore[attr-defined]
