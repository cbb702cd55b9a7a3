"""Random small programs under random options: the gradients are those without a session.

A program is a list of instructions over a stack of square matrices. What it saves, shares, keeps
alive and drops is up to the draw; so is the order of its backwards.
"""

import contextlib
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import offload
from tests.conftest import assert_empty
from tests.support import assert_identical, rand

N = 8  # columns of every matrix
WEIGHTS = 3


class Machine:
    """Runs instructions; every value is an N x N matrix of moderate size."""

    def __init__(self, seed: int, rows: int) -> None:
        torch.manual_seed(seed)
        self.rows = rows
        self.weights = [torch.nn.Parameter(rand(N, N, seed=seed + i) / N) for i in range(WEIGHTS)]
        self.leaves = [rand(rows, N, seed=seed + 10 + i).requires_grad_() for i in range(2)]

    def run(self, program: list[tuple[str, int, int]]) -> Tensor:
        values: list[Tensor] = [leaf * 1 for leaf in self.leaves]
        for name, i, j in program:
            a, b = values[i % len(values)], values[j % len(values)]
            values.append(OPERATIONS[name](self, a, b, i + j))
            if name == "forget" and len(values) > 2:
                del values[i % len(values)]
        return torch.stack([v.square().mean() for v in values[-3:]]).sum()

    def grads(self) -> list[Tensor]:
        """Of all inputs; zeros where a program did not use one."""
        out = []
        for t in [*self.weights, *self.leaves]:
            out.append(torch.zeros_like(t) if t.grad is None else t.grad.clone())
            t.grad = None
        return out


def _block(m: Machine, a: Tensor, k: int) -> Tensor:
    return F.gelu(F.linear(a, m.weights[k % WEIGHTS])) * a.tanh()


def _in_place(m: Machine, a: Tensor, b: Tensor, k: int) -> Tensor:
    c = a + b  # saves nothing
    c.mul_(0.5)  # neither does a product with a number
    return c.relu_()


def _scatter(m: Machine, a: Tensor, b: Tensor, k: int) -> Tensor:
    out = torch.zeros_like(a)
    out[: m.rows // 2] = a[m.rows - m.rows // 2 :] * 0.5
    out[m.rows // 2 :, ::2] = b[m.rows // 2 :, 1::2]
    return out


Operation = Callable[[Machine, Tensor, Tensor, int], Tensor]
OPERATIONS: dict[str, Operation] = {
    "linear": lambda m, a, b, k: F.linear(a, m.weights[k % WEIGHTS], a.mean(0)),
    "matmul": lambda m, a, b, k: a @ (b.t() @ a) / (N * m.rows),
    "mul": lambda m, a, b, k: (a * b).tanh(),
    "square": lambda m, a, b, k: a * a / 4,
    "view": lambda m, a, b, k: (
        a.view(N, m.rows).sin().view(m.rows, N) if a.is_contiguous() else a.contiguous().sin()
    ),
    "transpose": lambda m, a, b, k: (a.t().contiguous().t() * b).cos(),
    "slice": lambda m, a, b, k: torch.cat([a[1:].exp().reciprocal(), b[:1]]),
    "columns": lambda m, a, b, k: torch.cat([a[:, 3:] * b[:, :5], a[:, :3]], 1),
    "expand": lambda m, a, b, k: a[:1].expand(m.rows, N) * b,
    "softmax": lambda m, a, b, k: a.softmax(-1) * b,
    "layer_norm": lambda m, a, b, k: F.layer_norm(a, (N,), b[0], a[0] * 1),
    "dropout": lambda m, a, b, k: F.dropout(a, 0.3) + b,
    "where": lambda m, a, b, k: torch.where(a > 0, a.sigmoid(), b),
    "gather": lambda m, a, b, k: a.gather(0, b.argsort(0)) * 0.5,
    "maximum": lambda m, a, b, k: torch.maximum(a, b) + a.cummax(0).values * 0.1,
    "attention": lambda m, a, b, k: F.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    "half": lambda m, a, b, k: (a.bfloat16() * b.bfloat16()).to(a.dtype).tanh(),
    "double": lambda m, a, b, k: (a.double() * b.double()).sin().to(a.dtype),
    "complex": lambda m, a, b, k: (torch.complex(a, b) * torch.complex(b, a).conj()).imag.tanh(),
    "in_place": _in_place,
    "scatter": _scatter,
    "checkpoint": lambda m, a, b, k: checkpoint(_block, m, a, k, use_reentrant=False),
    "nested": lambda m, a, b, k: checkpoint(
        lambda a, b: checkpoint(_block, m, a, k, use_reentrant=False) * b.sin(),
        a,
        b,
        use_reentrant=False,
    ),
    "dropped": lambda m, a, b, k: a * (b.exp() * a).detach().tanh() + (b * b).sin() * 0,
    "forget": lambda m, a, b, k: a + b.sin(),
    "no_grad": lambda m, a, b, k: a * b.detach().sigmoid(),
}

programs = st.lists(
    st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 30), st.integers(0, 30)),
    min_size=1,
    max_size=12,
)
orders = st.sampled_from(
    ["one", "fifo", "lifo", "retain", "double", "partial", "outside", "never_then_one"]
)


def train(
    machine: Machine, program: list[tuple[str, int, int]], order: str, context: Any
) -> list[Tensor]:
    """The forwards and backwards of one step, in the given order."""
    torch.manual_seed(7)
    with context():
        if order in ("fifo", "lifo"):
            losses = [machine.run(program) for _ in range(3)]
            for loss in losses if order == "fifo" else losses[::-1]:
                loss.backward()
            return machine.grads()
        if order == "never_then_one":
            machine.run(program)
        loss = machine.run(program)
        if order == "retain":
            loss.backward(retain_graph=True)
            machine.run(program[::-1]).backward()
        if order == "double":
            first = torch.autograd.grad(loss, machine.leaves, create_graph=True, allow_unused=True)
            loss = loss + sum(g.square().mean() for g in first if g is not None)
        if order == "partial":
            part = torch.autograd.grad(loss, machine.leaves, retain_graph=True, allow_unused=True)
            loss = loss + sum(g.sum().detach() for g in part if g is not None)
        if order != "outside":
            loss.backward()
    if order == "outside":
        loss.backward()
    return machine.grads()


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options of a session that matter to what goes where and when."""
    window_bytes = draw(st.sampled_from([4096, 8192, 40_000, 1 << 20]))
    return {
        "window_bytes": window_bytes,
        "prefetch_bytes": draw(st.sampled_from([0, 1, 4096, 50_000, 1 << 20])),
        "keep_last_bytes": draw(st.sampled_from([0, 1, 5000, 1 << 20])),
        "min_offload_bytes": draw(st.sampled_from([0, 0, 1, 100, 2049])),
        "bundle_bytes": draw(st.sampled_from([None, 0, 4096, 20_000])),
        "host_budget": draw(st.sampled_from([None, None, window_bytes])),
        "disk_budget": draw(st.sampled_from([None, None, 0, 20_000])),
        "verify": draw(st.booleans()),
        "io_threads": draw(st.sampled_from([1, 3])),
        "io_block_bytes": draw(st.sampled_from([4096, 8 << 20])),
    }


# "double" of nested checkpoints and attention is what torch itself cannot do on every path.
NOT_TWICE = {"attention", "checkpoint", "nested"}


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=programs,
    order=orders,
    chosen=options(),
    rows=st.sampled_from([N, 64]),
    seed=st.integers(0, 3),
)
def test_gradients_are_those_without_a_session(
    tmp_path_factory: pytest.TempPathFactory,
    engine: str,
    program: list[tuple[str, int, int]],
    order: str,
    chosen: dict[str, Any],
    rows: int,
    seed: int,
) -> None:
    if order == "double" and NOT_TWICE & {name for name, _, _ in program}:
        order = "one"
    machine = Machine(seed, rows)
    expected = train(machine, program, order, contextlib.nullcontext)
    directory = tmp_path_factory.getbasetemp()
    with offload.Session(disk_dir=directory, engine=engine, **chosen) as session:
        for _ in range(2):  # the second step uses what the first one taught
            with session.step() as step:
                pass
            assert_identical(expected, train(machine, program, order, session.step))
        report = session.report()
        if session._hooks.live_blocks:
            gc.collect()
        assert session._hooks.live_blocks == 0
    assert_empty(session)
    assert step.report.offloaded_bytes == 0
    assert report.warnings == ()
    assert "error" not in report.kept_bytes
    budget = chosen["disk_budget"]
    assert budget is None or report.peak_disk_bytes <= budget
    event("offloads" if report.offloaded_blocks else "keeps all")
