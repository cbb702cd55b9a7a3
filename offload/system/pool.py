"""Pool: the memory of the CPU's large tensors, used again as soon as offloading frees it.

A tensor that leaves in the middle of a forward makes room only if the next one can have its memory.
glibc before 2.38 does not see to that, and what it maps and unmaps costs a page fault for every
page; ``csrc/pool.h`` does, put under torch's own allocator for the life of the process.
"""

from typing import Literal

from offload.errors import OffloadError

try:
    from offload._native import begin_pool_period as begin_step
    from offload._native import use_pool_for_torch as why_no_pool
except ImportError:  # no compiler at installation

    def why_no_pool() -> str:
        """Take the pool into use; why that cannot be, or an empty text."""
        return "the C++ extension of offload was not built"

    def begin_step() -> None:
        """A training step begins: what neither it nor the last one needs goes back to the
        system.
        """


__all__ = ["Allocator", "begin_step", "use_pool", "why_no_pool"]

Allocator = Literal["pool", "system"]


def use_pool(allocator: Allocator | None) -> None:
    """Give torch's CPU allocator its large memory (128 KiB or more) from the pool from now on.

    Args:
        allocator: ``None``: where it can be; ``"pool"``: or else raise; ``"system"``: do nothing.

    Raises:
        OffloadError: it cannot be, and ``"pool"`` was asked for.

    Example:
        >>> use_pool("system")
    """
    if allocator == "system":
        return
    reason = why_no_pool()
    if reason and allocator == "pool":
        raise OffloadError(f"allocator='pool' cannot be had: {reason}; leave it at None")
