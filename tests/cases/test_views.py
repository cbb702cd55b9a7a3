"""Views, strides and shared storages come back exactly, and each storage moves once."""

import weakref

import pytest
import torch

from offload import Session
from tests.support import Probe, assert_same, drain, ints


def test_square_matrix_and_its_transpose(session: Session) -> None:
    """Same storage, same shape, same type: only the strides tell them apart."""

    def step(context):
        x = ints(4, 4).requires_grad_()
        with context():
            a = x * 3
            b = a.t()
            loss = (a * b * ints(4, 4, seed=1)).sum() + (b[:, 0] * a[0]).sum()
            loss.backward()
        return [x.grad]

    assert_same(step, session)


def test_parts_with_version_counters_of_their_own(session: Session) -> None:
    """Recurrent cells split their gates like this: one part changes after another was saved, and
    neither's version tells of it.
    """

    def step(context):
        x = ints(4, 8).requires_grad_()
        with context():
            first, second = (x * 0.5).unsafe_chunk(2, dim=1)
            a = first.sigmoid_()
            y = a * a
            b = second.sigmoid_()
            z = (a * b + b * b * y).sum()
            del first, second, a, b, y
            z.backward()
        return [x.grad]

    assert_same(step, session)


def test_parts_saved_through_data(session: Session) -> None:
    """``Tensor.data`` has a version counter of its own, which starts anew each time."""

    def step(context):
        x = ints(4, 8).requires_grad_()
        with context():
            h = torch.zeros(8, 8)
            h[:4] = x.detach()
            loss = (x * h[:4].data).sum()
            h[4:] = x.detach() * 3
            loss = loss + (x * h[4:].data).sum()
            del h
            loss.backward()
        return [x.grad]

    assert_same(step, session)


def test_address_used_again_by_the_allocator(session: Session) -> None:
    """A freed tensor's address says nothing about the next tensor that gets it."""

    def step(context):
        x = ints(64, 64).requires_grad_()
        total = torch.zeros((), dtype=torch.double)
        with context():
            for i in range(30):
                h = x * float(i + 1)
                total = total + (h * h).sum()
                del h
            total.backward()
        return [x.grad]

    assert_same(step, session)


def test_slices_with_offsets_and_steps(session: Session) -> None:
    """Offsets count from the start of the storage."""

    def step(context):
        x = ints(8, 6).requires_grad_()
        with context():
            h = x * 2
            loss = (h[2:6] * h[0:4]).sum() + (h[1:] ** 3).sum()
            loss = loss + (h[:, 1:3] * h[:, 3:5]).sum() + (h[::2, 1::2] ** 2).sum()
            del h
            loss.backward()
        return [x.grad]

    assert_same(step, session)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(5, 7).t(),
        lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(3, 4, 5).permute(2, 0, 1),
        lambda: torch.randn(4, 1).expand(4, 6),
    ],
    ids=["transposed", "channels_last", "permuted", "expanded"],
)
def test_strides_are_kept(session: Session, make) -> None:
    """A contiguous copy would change the order of sums, and so the last bits."""
    log = {}
    with session.step():
        Probe.apply(make().requires_grad_() * 1, log).sum().backward()
    assert log["saved"][1] == log["back"][1]


def test_expanded_tensor_is_stored_once(session: Session) -> None:
    """A row that is seen 1024 times is one row in memory and on disk."""
    x = torch.randn(1, 1 << 12, requires_grad=True)
    with session.step() as step:
        h = (x * 1).expand(1024, 1 << 12)
        loss = Probe.apply(h, {})[:, 0].sum()
        del h
    drain(session)
    assert step.report.offloaded_bytes == 1 << 14
    assert step.report.peak_disk_bytes in (0, 1 << 14)
    loss.backward()


def test_shared_storage_moves_once(session: Session) -> None:
    """Query, key and value cut from one projection are one block."""

    def step(context):
        x = ints(16, 8).requires_grad_()
        w = torch.nn.Parameter(ints(8, 24, seed=1))
        with context():
            q, k, v = (x @ w).chunk(3, dim=1)
            out = (q @ k.t()) @ v
            del q, k, v
            out.sum().backward()
        return [x.grad, w.grad]

    assert_same(step, session)
    report = session.report()
    projection_bytes, scores_bytes, input_bytes = 16 * 24 * 8, 16 * 16 * 8, 16 * 8 * 8
    assert report.offloaded_bytes == projection_bytes + scores_bytes + input_bytes
    assert report.deduplicated_bytes == 2 * projection_bytes  # saved three times


def test_same_tensor_saved_many_times(session: Session) -> None:
    """x*x saves x twice, and it is read once."""
    x = ints(1024).requires_grad_()
    with session.step() as step:
        h = x * 1
        loss = (h * h).sum()
        del h
    assert step.report.offloaded_blocks == 1
    loss.backward()
    assert step.report.read_bytes + step.report.forwarded_bytes > 0
    assert step.report.read_bytes <= 8192
    assert torch.equal(x.grad, 2 * x.detach())


def test_small_view_of_a_data_set(session: Session) -> None:
    """A batch that is a slice of all data does not send all data to the disk."""
    data = torch.randn(10_000, 16)
    model = torch.nn.Linear(16, 4)
    with session.step() as step:
        model(data[64:72]).sum().backward()
    assert step.report.offloaded_bytes < data.nbytes // 4


def test_odd_types_and_shapes(session: Session) -> None:
    """Empty, zero-dimensional, boolean, integer, complex and half-precision tensors."""

    def step(context):
        out = []
        u = ints(5, seed=2).requires_grad_()
        z = torch.complex(ints(5), ints(5, seed=1)).requires_grad_()
        e = torch.zeros(0, 4, dtype=torch.double, requires_grad=True)
        w = ints(4, 3).requires_grad_()
        s = torch.tensor(3.0, requires_grad=True)

        def add(f, *leaves):
            for leaf in leaves:
                leaf.grad = None
            with context():
                f().backward()
            out.extend(leaf.grad.clone() for leaf in leaves)

        add(lambda: ((e * 2) @ (w * 2)).sum() + (w * w).sum(), e, w)
        add(lambda: (s * s * 2).sin(), s)
        add(lambda: (u * 2).masked_fill(u > 0, 0.0).pow(2).sum(), u)
        add(lambda: ((u * 3).gather(0, torch.tensor([4, 0, 0])) ** 2).sum(), u)
        add(lambda: torch.where(u > 0, u * u, -u).sum(), u)
        add(lambda: (u * 2).sort().values[2] * u.max(), u)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            v = ints(6).to(dtype).requires_grad_()
            add(lambda v=v: ((v * 2) * (v + 1)).sum(), v)
        add(lambda: ((z * 2).conj() * (u * 3)).abs().sum(), z, u)
        add(lambda: ((z * 2).conj().imag * (u * u)).sum(), z, u)
        add(lambda: torch.view_as_real(z * z).sum(), z)
        return out

    assert_same(step, session)


def test_kinds_without_plain_bytes_stay(session: Session) -> None:
    """Sparse matrices are passed through."""

    def step(context):
        a = torch.eye(4, dtype=torch.double).to_sparse()
        x = ints(4, 3).requires_grad_()
        with context():
            (torch.sparse.mm(a, x * 2) ** 2).sum().backward()
        return [x.grad]

    assert_same(step, session)


def test_it_really_offloads(session: Session) -> None:
    """The original is given up while the graph waits, and its values come back."""
    log = {}
    with session.step() as step:
        h = torch.randn(1 << 14, requires_grad=True) * 1
        y = Probe.apply(h, log)
        original = weakref.ref(h.untyped_storage())
        del h
    drain(session)
    assert original() is None
    assert step.report.offloaded_bytes == 1 << 16
    if session.config.device.type == "cpu":
        assert step.report.written_bytes == 1 << 16
    y.sum().backward()
    assert "back" in log
