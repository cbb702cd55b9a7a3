"""Policy and Placement: where a saved tensor goes. Pure decisions over values."""

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch


class Placement(Enum):
    """Where the bytes of a saved tensor wait for backward.

    ``KEEP``: on the device. ``HOST``: in host memory, which on ``device="cpu"`` is the same.
    ``DISK``: on the disk, by way of host memory.
    """

    KEEP = "keep"
    HOST = "host"
    DISK = "disk"


class SavedTensor(NamedTuple):
    """What a policy is told of a tensor that autograd is about to save.

    Tensors that never move (parameters and their casts, anything smaller than
    ``min_offload_bytes``, kinds that cannot be moved exactly) are not asked about.

    Attributes:
        nbytes: bytes of its whole storage: views of one storage move together.
        dtype: of its elements.
        size: its shape.
        device: where it is.

    Example:
        >>> import torch, offload
        >>> def matrices_only(saved):
        ...     return offload.Placement.DISK if len(saved.size) == 2 else offload.Placement.KEEP
        >>> x = torch.randn(4, 64, 64, requires_grad=True)
        >>> with offload.Session(policy=matrices_only, device="cpu", min_offload_bytes=0) as s:
        ...     with s.step() as step:
        ...         x.exp()[0].exp().sum().backward()
        >>> step.report.kept_bytes["policy"], step.report.saved_bytes
        (65536, 16384)
    """

    nbytes: int
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
