"""Operators, random numbers and what training uses, on the simulated accelerator under every
scheduler.
"""

import functools
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from offload.units import MIB

accelerator = torch.accelerator

pytestmark = pytest.mark.usefixtures("scheduler")


def randn(*size: int, **options) -> Tensor:
    return torch.randn(*size, device="sim", **options)


# --- operators


def test_a_wrong_shape_is_reported_at_once():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        randn(3, 4) @ randn(3, 4)


def test_devices_do_not_mix():
    with pytest.raises(RuntimeError, match="same device"):
        randn(3) + torch.randn(3)


def test_host_scalars_and_host_indices_do_mix():
    x = randn(6, 6)
    assert torch.equal((x * torch.tensor(2.0)).cpu(), x.cpu() * 2)
    assert torch.equal(x[torch.tensor([1, 2])].cpu(), x.cpu()[[1, 2]])


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "index": lambda x: x[torch.tensor([0, 2], device=x.device)],
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "topk": lambda x: x.topk(2).values,
    "sort": lambda x: x.sort().indices,
    "cumsum": lambda x: x.cumsum(0),
    "where": lambda x: torch.where(x > 0, x, -x),
    "scatter_add": lambda x: x.scatter_add(0, torch.zeros_like(x, dtype=torch.int64), x),
    "embedding": lambda x: F.embedding(torch.tensor([0, 2], device=x.device), x),
    "conv2d": lambda x: F.conv2d(x[None, None], x[None, None, :3, :3]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "bfloat16": lambda x: x.bfloat16() @ x.bfloat16(),
    "unfold": lambda x: x.flatten().unfold(0, 3, 2).sum(1),
    "complex": lambda x: torch.view_as_real(x.to(torch.complex64) * 1j),
    "conjugate": lambda x: torch.view_as_real((x * 1j).conj().resolve_conj()),
    "dtype view": lambda x: x.view(torch.int32) + 1,
    "transpose": lambda x: x.T.contiguous(),
    "diagonal": lambda x: x.clone().diagonal().add_(1),
    "assign": lambda x: x.clone().index_fill_(0, torch.tensor([0], device=x.device), 3.0),
    "out": lambda x: torch.add(x, 1, out=torch.empty(0, device=x.device)),
    "empty": lambda x: x[:0].sum(1) + 1,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_what_the_cpu_gives(name):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    expected = OPERATORS[name](x)
    got = OPERATORS[name](x.to("sim")).cpu()
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert torch.equal(got, expected)


def test_the_host_may_change_its_tensor_after_an_operator_was_queued():
    scalar = torch.tensor(2.0)
    x = torch.ones(3, device="sim") * scalar
    scalar.fill_(5.0)
    assert x.sum().item() == 6


def test_fused_operators_stay_whole():
    q = randn(1, 2, 4, 8, requires_grad=True)
    attention, norm = F.scaled_dot_product_attention(q, q, q), F.layer_norm(q, (8,))
    assert "FlashAttention" in type(attention.grad_fn).__name__
    assert type(norm.grad_fn).__name__ == "NativeLayerNormBackward0"


def test_a_storage_can_be_emptied_and_refilled():
    x = torch.empty(MIB, device="sim")
    before = accelerator.memory_allocated()
    x.untyped_storage().resize_(0)
    assert before - accelerator.memory_allocated() == 4 * MIB
    x.untyped_storage().resize_(4 * MIB)
    assert accelerator.memory_allocated() == before


def test_a_storage_keeps_its_bytes_when_it_grows():
    x = torch.arange(4.0, device="sim")
    x.untyped_storage().resize_(64)
    assert torch.equal(x.cpu(), torch.arange(4.0))


# --- random numbers


def test_the_generator_repeats():
    generator = torch.Generator("sim").manual_seed(3)
    x = randn(3, generator=generator)
    state = generator.get_state()
    y = randn(3, generator=generator)
    generator.set_state(state)
    assert torch.equal(y, randn(3, generator=generator))
    generator.manual_seed(3)
    assert torch.equal(x, randn(3, generator=generator))
    assert not torch.equal(x, y)


def test_fork_rng_restores_the_state():
    torch.manual_seed(1)
    with torch.random.fork_rng(device_type="sim"):
        x = randn(2)
    assert torch.equal(x, randn(2))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_repeats_dropout(use_reentrant):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)).to("sim")
    x = randn(4, 8, requires_grad=True)
    state = torch.sim.get_rng_state()
    (expected,) = torch.autograd.grad(model(x).sum(), x)
    torch.sim.set_rng_state(state)
    checkpoint(model, x, use_reentrant=use_reentrant).sum().backward()
    assert torch.equal(x.grad, expected)


# --- what training uses


def test_selective_checkpointing():
    def policy(context, op, *args, **kwargs):
        is_product = op == torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    x, w = randn(8, 8, requires_grad=True), randn(8, 8, requires_grad=True)

    def f(x, w):
        return (x @ w).relu() @ w

    (expected,) = torch.autograd.grad(f(x, w).sum(), x)
    checkpoint(f, x, w, use_reentrant=False, context_fn=contexts).sum().backward()
    assert torch.equal(x.grad, expected)


def test_save_on_cpu():
    x = randn(64, 64, requires_grad=True)
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        y = (x.exp() * x).sum()
    y.backward()
    assert torch.allclose(x.grad.cpu(), (x.exp() * (1 + x)).detach().cpu(), atol=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    [
        functools.partial(torch.optim.SGD, foreach=True),
        functools.partial(torch.optim.AdamW, foreach=True),
        functools.partial(torch.optim.AdamW, fused=True),
    ],
    ids=["sgd", "adamw-foreach", "adamw-fused"],
)
def test_optimizers(optimizer):
    updated = []
    for device in ("cpu", "sim"):
        parameter = nn.Parameter(torch.linspace(-1, 1, 64).reshape(8, 8).to(device))
        step = optimizer([parameter], lr=0.1)
        (parameter * parameter).sum().backward()
        nn.utils.clip_grad_norm_([parameter], 1.0)
        step.step()
        updated.append(parameter.detach().cpu())
    assert torch.allclose(*updated)


def test_grad_scaler():
    scaler, parameter = torch.amp.GradScaler("sim"), nn.Parameter(torch.ones(8, device="sim"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale((parameter * parameter).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 65536
    assert torch.allclose(parameter.detach().cpu(), torch.full((8,), 0.8))


def test_data_loader_pins():
    loader = torch.utils.data.DataLoader(torch.randn(8, 3), batch_size=4, pin_memory=True)
    assert [batch.is_pinned() for batch in loader] == [True, True]


def test_save_and_load():
    file, x = io.BytesIO(), randn(3)
    torch.save(x, file)
    for place in ("sim", "cpu"):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert loaded.device.type == place
        assert torch.equal(loaded.cpu(), x.cpu())


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
def test_compile(backend):
    torch._dynamo.reset()
    x = randn(5, requires_grad=True)
    torch.compile(lambda x: (x.sin() * 2).sum(), backend=backend)(x).backward()
    assert torch.allclose(x.grad.cpu(), 2 * x.detach().cpu().cos())


def test_fake_tensors():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        assert torch.empty(3, device="sim").device == torch.device("sim", 0)


@pytest.mark.filterwarnings("ignore")  # of the profiler's own making
def test_profiler():
    with torch.profiler.profile(profile_memory=True) as profile:
        randn(10, 10) @ randn(10, 10)
    assert "aten::mm" in {event.key for event in profile.key_averages()}
