"""Which saved tensors never move.

Parameters and their views (``Linear`` saves ``weight.t()``), since optimizers and sharding
libraries write to their storage; the low-precision casts of them that autocast caches; kinds
without plain bytes (sparse, quantized, nested, fake, wrapper subclasses).
"""

import torch

from offload.tensors.live import is_parameter_like

_is_functorch_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
_PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_never_moved(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """One of those named above, or a part of a data set, which its owner keeps."""
    return (
        is_parameter_like(tensor)
        or is_cast_of_parameter(tensor)
        or is_part_of_data(tensor, storage_bytes)
    )


def has_plain_bytes(tensor: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    """Whether the bytes of ``storage`` and a layout are all there is to ``tensor``."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not tensor.is_quantized
        and not _is_functorch_wrapped(tensor)
        and storage.data_ptr() != 0
    )


def is_part_of_data(tensor: torch.Tensor, storage_bytes: int) -> bool:
    """Whether it is a small view of something larger that needs no gradient: a batch of a data set.

    Whole storages move, and this one would: a data set copied for the sake of one batch, while its
    owner keeps it in memory all the same.
    """
    return (
        tensor._base is not None
        and not tensor.requires_grad
        and 2 * tensor.numel() * tensor.element_size() < storage_bytes
    )


def is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether autocast made it from a parameter: ``weight.to(bfloat16)``, or a view of that."""
    base = tensor._base if tensor._base is not None else tensor
    node = base.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    source = node.next_functions[0][0]
    return isinstance(getattr(source, "variable", None), torch.nn.Parameter)
