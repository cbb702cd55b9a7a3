"""Policy and Placement: where a saved tensor goes. Pure decisions over values."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch


class Placement(Enum):
    """Where the bytes of a saved tensor wait for backward."""

    KEEP = "keep"  # on the device
    HOST = "host"  # in host memory; on device="cpu" the same as KEEP
    DISK = "disk"


class SavedTensor(NamedTuple):
    """What a policy is told of a tensor that autograd is about to save.

    Tensors that never move (parameters and their casts, anything smaller than
    ``min_offload_bytes``, kinds that cannot be moved exactly) are not asked about.
    """

    nbytes: int  # of its whole storage: views of one storage move together
    dtype: torch.dtype
    size: tuple[int, ...]
    device: torch.device


Policy = Callable[[SavedTensor], Placement]


def offload_all(tensor: SavedTensor) -> Placement:
    """The default policy: everything goes to the next slower tier, from there on as room demands.

    From an accelerator that is host memory, whose oldest blocks go on to the disk when it runs
    short; on ``device="cpu"`` it is the disk.

    Example:
        >>> offload_all(SavedTensor(1 << 20, torch.float32, (512, 512), torch.device("cpu")))
        <Placement.DISK: 'disk'>
        >>> offload_all(SavedTensor(1 << 20, torch.float32, (512, 512), torch.device("cuda")))
        <Placement.HOST: 'host'>
    """
    return next_tier(tensor.device.type == "cpu")


def next_tier(is_cpu: bool) -> Placement:
    """The next slower one: from the CPU's memory the disk, from an accelerator host memory."""
    return Placement.DISK if is_cpu else Placement.HOST
