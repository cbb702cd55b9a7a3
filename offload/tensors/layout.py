"""TensorLayout: how one saved tensor views the bytes of its storage."""

from functools import cache
from typing import NamedTuple

import torch


class TensorLayout(NamedTuple):
    """All that is needed to make the same view of the same bytes again.

    Strides are kept exactly: a tensor that comes back contiguous where it was transposed makes the
    matrix multiplication of backward take another path, and its gradients differ in the last bits.
    """

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int  # in elements, as torch counts it
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "TensorLayout":
        """The layout of ``tensor``; its storage is not looked at."""
        fields = (
            tensor.dtype,
            tensor.size(),
            tensor.stride(),
            tensor.storage_offset(),
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return tuple.__new__(cls, fields)  # as cls(...), without a frame of Python's

    def view(self, storage: torch.UntypedStorage, counter: torch.Tensor) -> torch.Tensor:
        """A tensor of this layout over ``storage``: no copy, exact strides and offset.

        It shares the version counter of ``counter``. Whoever changes it in place is then noticed by
        all who share that counter, as with the tensor that was saved.
        """
        bare = _empty(self.dtype, storage.device).detach()
        bare.set_(storage, self.storage_offset, self.size, self.stride)
        if self.conjugate or self.negative:
            bare = with_bits(bare, self.conjugate, self.negative)
        tensor = counter.detach()
        tensor.data = bare
        return tensor

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.size)}"


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):  # whoever asks first
        return torch.empty(0, dtype=dtype, device=device)


def with_bits(bare: torch.Tensor, conjugate: bool, negative: bool) -> torch.Tensor:
    """A view of the same bytes as conjugated or negative values. ``Tensor.data`` may only be set to
    a tensor with the same bits, on all devices but the best known.
    """
    if conjugate:
        bare = torch._conj(bare)
    return torch._neg_view(bare) if negative else bare
