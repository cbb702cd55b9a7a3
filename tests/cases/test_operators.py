"""Every differentiable operator of torch, by torch's own list of them with sample inputs."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from offload.units import KIB
from tests.conftest import Opener
from tests.support import Context, rand

SHARES = 8  # that the operators are dealt into
SAMPLES = 4  # of each that are run
LEFT_OUT = "nn.functional.rrelu"  # autograd saves its noise before that is drawn: see the README
WAYS = {"by themselves": 0, "in bundles": 4 * KIB}  # of bundle_bytes


def samples(share: int) -> Iterator[tuple[Any, Any]]:
    """Operator and sample, for a share of the operators."""
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    for op in itertools.islice(op_db, share, None, SHARES):
        if op.name == LEFT_OUT:
            continue
        if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu"):
            torch.manual_seed(0)
            some = op.sample_inputs("cpu", torch.float64, requires_grad=True)
            yield from ((op, sample) for sample in itertools.islice(some, SAMPLES))


def gradients(op: Any, sample: Any, context: Context) -> list[Tensor]:
    """Of all inputs that need one. What the operator is given dies with the graph."""
    torch.manual_seed(0)
    inputs = tree_map(_copied, (sample.input, sample.args, sample.kwargs))
    with context():
        given, args, kwargs = tree_map(_computed, inputs)
        results = _differentiable(op(given, *args, **kwargs))
        del given, args, kwargs
        scales = [rand(r.numel()).view(r.shape).to(r.dtype) for r in results]
        found = torch.autograd.grad(results, _differentiable(inputs), scales, allow_unused=True)
    dense = (g.to_dense() for g in found if g is not None)
    return [torch.view_as_real(g) if g.is_complex() else g for g in dense]


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _computed(value: Any) -> Any:
    return value * 1 if isinstance(value, Tensor) and value.requires_grad else value


def _differentiable(values: Any) -> list[Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, Tensor) and v.requires_grad]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.nan_to_num(0.5), b.nan_to_num(0.5)) for a, b in pairs)


@pytest.mark.filterwarnings("ignore")  # operators give many of their own
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("share", range(SHARES))
def test_operators(open_session: Opener, any_engine: str, share: int, way: str) -> None:
    session = open_session(engine=any_engine, bundle_bytes=WAYS[way])
    wrong, checked = [], 0
    for op, sample in samples(share):
        try:
            expected, again = (gradients(op, sample, contextlib.nullcontext) for _ in range(2))
        except (RuntimeError, NotImplementedError):
            continue  # it has no gradient for this sample
        if not same(expected, again):
            continue  # nor has it always the same
        checked += 1
        if not same(expected, gradients(op, sample, session.step)):
            wrong.append(f"{op.name} {op.variant_test_name} of {sample}")
    assert not wrong
    assert checked > 100
