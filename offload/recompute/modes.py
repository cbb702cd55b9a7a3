"""RegionMode: sees the operations of a region, below autograd."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["IGNORED", "RegionMode"]

IGNORED = torch_checkpoint.SAC_IGNORED_OPS  # questions about shapes, and detach: nothing computed


class RegionMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operations of a region. Those of a backward inside of it are not the region's: what
    that asks for may have regions recomputed, this one or those around it, and their operations are
    not this one's next.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._graph_task = -1

    def __enter__(self) -> Any:
        self._graph_task = torch._C._current_graph_task_id()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def is_inside_backward(self) -> bool:
        """Whether what runs now belongs to a backward that began inside the region."""
        return torch._C._current_graph_task_id() != self._graph_task

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code inside a region stays compiled."""
        return True
