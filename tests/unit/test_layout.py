"""A view described and made again: same bits, strides, offset and flags."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.tensors.layout import TensorLayout

DTYPES = [
    torch.bool, torch.uint8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """Any strided view of some bytes, with or without the conjugate and negative bits."""
    dtype = draw(st.sampled_from(DTYPES))
    size = draw(st.lists(st.integers(0, 4), max_size=4))
    stride = [draw(st.integers(0, 5)) for _ in size]
    offset = draw(st.integers(0, 7))
    span = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True) if n) + 1
    nbytes = span * torch.empty((), dtype=dtype).element_size()
    raw = torch.arange(nbytes, dtype=torch.int64).mul(37).remainder(251).to(torch.uint8)
    if dtype is torch.bool:
        raw = raw % 2
    base = raw.view(dtype)
    view = base.as_strided(size, stride, offset)
    if dtype.is_complex:
        if draw(st.booleans()):
            view = view.conj()
        if draw(st.booleans()):
            view = view.imag if draw(st.booleans()) else view.real
    return view


def bits(tensor: torch.Tensor) -> bytes:
    if not tensor.numel():
        return b""
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return bytes(plain.flatten().view(torch.uint8))


@given(views())
def test_made_again_over_a_copy(tensor: torch.Tensor) -> None:
    layout = TensorLayout.of(tensor)
    again = layout.view(tensor.untyped_storage().clone(), torch.empty(0))
    assert again.dtype == tensor.dtype
    assert again.size() == tensor.size()
    assert again.stride() == tensor.stride()
    assert again.storage_offset() == tensor.storage_offset()
    assert (again.is_conj(), again.is_neg()) == (tensor.is_conj(), tensor.is_neg())
    assert again.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert bits(again) == bits(tensor)
    assert TensorLayout.of(again) == layout


def test_no_copy_is_made() -> None:
    storage = torch.arange(12.0).untyped_storage()
    view = TensorLayout(torch.float32, (2, 3), (1, 4), 1, False, False).view(
        storage, torch.empty(0)
    )
    assert view.untyped_storage()._cdata == storage._cdata
    assert view.tolist() == [[1.0, 5.0, 9.0], [2.0, 6.0, 10.0]]


def test_printed_for_people() -> None:
    assert str(TensorLayout.of(torch.zeros(2, 3, dtype=torch.bfloat16))) == "bfloat16[2, 3]"


def test_views_share_the_version_of_a_counter() -> None:
    x = torch.zeros(3)
    view = TensorLayout.of(x).view(torch.ones(3).untyped_storage(), x.detach())
    view.add_(1)
    assert x._version == 1
