"""Small storages that leave together: the same gradients, in fewer transfers, and nothing lost."""

import gc
import threading
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from offload.errors import ModifiedInPlaceError, StateError, StorageError
from offload.units import KIB
from tests.conftest import Opener
from tests.support import (
    assert_identical,
    assert_same,
    drain,
    grads,
    in_child,
    ints,
    net,
    rand,
)

# Sixteen of the tensors below fill a bundle.
BUNDLED = {"min_offload_bytes": 1, "bundle_bytes": 8 * KIB}


@pytest.fixture
def session(open_session: Opener, engine: str) -> Any:
    return open_session(engine=engine, **BUNDLED)


def chain(x: torch.Tensor, length: int = 40) -> torch.Tensor:
    """Saves ``length`` tensors of 504 bytes, no multiple of what members are aligned to."""
    y = x
    for _ in range(length):
        y = y.sin()
    return y


def small() -> torch.Tensor:
    return rand(126).requires_grad_()


def test_they_leave_together(session: Any) -> None:
    expected, x = small(), small()
    chain(expected).sum().backward()
    for _ in range(2):
        x.grad = None
        with session.step() as step:
            chain(x).sum().backward()
        drain(session)
        assert torch.equal(x.grad, expected.grad)
        report = step.report
        # 39 results (the first saves x itself) at 512 bytes each: 2 full bundles, and 7 stay.
        assert (report.offloaded_blocks, report.offloaded_bytes) == (2, 16 * KIB)
        assert report.saved_bytes == 16 * KIB
        assert report.kept_bytes == {"bundle": (40 - 2 * 16) * 504}
        assert report.written_bytes <= 16 * KIB


def test_they_come_back_ahead_of_backward(session: Any) -> None:
    x = small()
    for _ in range(2):  # the first teaches the order
        with session.step() as step:
            chain(x, 200).sum().backward()
        drain(session)
    report = step.report
    assert report.offloaded_blocks == 12
    assert report.read_bytes + report.forwarded_bytes >= 12 * 8 * KIB
    assert report.misses <= 1
    assert report.hits + report.lates + report.misses == 200


def test_a_bundle_is_written_and_read_once(session: Any) -> None:
    with session.step() as step:
        loss = chain(small(), 80).sum()
    drain(session)
    assert step.report.written_bytes == 4 * 8 * KIB or step.report.written_bytes == 5 * 8 * KIB
    loss.backward()
    drain(session)
    assert step.report.read_bytes <= step.report.written_bytes


def test_larger_ones_move_by_themselves(session: Any) -> None:
    x = rand(128).requires_grad_()  # 512 bytes are a sixteenth of a bundle, and not less
    with session.step() as step:
        x.sin().sin().sum().backward()
    assert step.report.offloaded_blocks == 2
    assert step.report.kept_bytes == {}


@pytest.mark.parametrize("options", [{"bundle_bytes": 0}, {"min_offload_bytes": 0}, {}])
def test_where_there_are_none(open_session: Opener, any_engine: str, options: Any) -> None:
    session = open_session(engine=any_engine, **{"min_offload_bytes": 1, **options})
    with session.step() as step:
        chain(small()).sum().backward()
    moved = options != {}  # by default they are larger than all of this
    assert step.report.offloaded_blocks == (40 if moved else 0)


def test_kinds_views_and_what_is_shared(session: Any) -> None:
    def step(context: Any) -> list[torch.Tensor]:
        x, z = ints(3, 5).requires_grad_(), torch.complex(ints(7), ints(7, seed=1))
        z.requires_grad_()
        half = rand(33).bfloat16().requires_grad_()
        empty = torch.zeros(0, 4, requires_grad=True)
        with context():
            for _ in range(12):
                y = (x * 3).t()
                loss = (y * y).sum() + (y[1:] * y[1:]).sum()  # one storage, four tickets
                w = z * 2
                loss = loss + (w * w.conj()).real.sum() + (w.imag * w.imag).sum()
                loss = loss + half.exp().tanh().float().sum() + (empty * empty).sum()
                mask = (x > 0).double()
                loss = loss + (x * mask).sum() + x.masked_fill(x > 1, 0.0).square().sum()
                loss.backward()
        return [x.grad, z.grad, half.grad, empty.grad]

    assert_same(step, session)


def test_retained_and_differentiated_twice(session: Any) -> None:
    def step(context: Any) -> list[torch.Tensor]:
        x = small()
        with context():
            y = chain(x).sum()
            (first,) = torch.autograd.grad(y, x, create_graph=True)
            (first.square().sum() + y).backward(retain_graph=True)
            y.backward()
        return [x.grad]

    assert_same(step, session)


def test_several_forwards_share_bundles(session: Any) -> None:
    def step(context: Any) -> list[torch.Tensor]:
        x = small()
        with context():
            losses = [chain(x, 9).sum() for _ in range(7)]
            for i in (3, 0, 6, 1, 5, 2):  # the last is dropped
                losses[i].backward()
            del losses
        return [x.grad]

    for _ in range(2):
        assert_same(step, session)


@pytest.mark.parametrize("reentrant", [True, False])
def test_within_and_around_checkpoints(session: Any, reentrant: bool) -> None:
    def step(context: Any) -> list[torch.Tensor]:
        model, x = net(), rand(6, 16).requires_grad_()
        with context():
            y = x * 2
            for _ in range(5):
                y = checkpoint(model, y, use_reentrant=reentrant)
                y = y + chain(y, 3)
            y.sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)


def test_threads_that_share_a_session(session: Any) -> None:
    expected = small()
    chain(expected, 60).sum().backward()
    results: list[torch.Tensor] = []

    def train() -> None:
        x = small()
        with session.step():
            chain(x, 60).sum().backward()
        assert x.grad is not None
        results.append(x.grad)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_identical([expected.grad] * 4, results)


@pytest.mark.parametrize("length", [3, 60])
def test_changed_in_place(session: Any, length: int) -> None:
    """In a bundle that fills up after it, and in one that does not."""
    x = small()
    with session.step():
        changed = x * 1
        y = chain(changed, length)
        changed.add_(1)
    with pytest.raises(ModifiedInPlaceError, match="expected version 0"):
        y.sum().backward()
    with session.step():
        chain(x).sum().backward()


def test_an_original_that_lives_is_what_backward_gets(session: Any) -> None:
    """Written to without torch's notice, as backward without a session would see it."""
    x = small()
    with session.step():
        held = x * 1
        y = chain(held, 60)
        held.data.numpy()[:] = 0.5
    drain(session)
    y.sum().backward()
    expected = torch.full_like(x, 0.5).requires_grad_()
    first = expected.cos()
    del expected
    again = small()
    z = again * 1
    kept = z.detach().clone()
    w = chain(z, 60)
    (inner,) = torch.autograd.grad(w.sum(), z)
    factor = first / kept.cos()
    assert torch.allclose(x.grad, inner * factor, rtol=1e-4, atol=1e-6)


def test_dropped_graphs_leave_nothing(session: Any) -> None:
    for _ in range(3):
        with session.step():
            loss = chain(small(), 70).sum()
        del loss
        gc.collect()
        assert session._hooks.live_blocks == 0


def test_a_full_disk_keeps_them_in_memory(open_session: Opener, engine: str) -> None:
    session = open_session(engine=engine, **BUNDLED, disk_budget=8 * KIB)
    expected, x = small(), small()
    chain(expected, 100).sum().backward()
    with session.step() as step:
        chain(x, 100).sum().backward()
    assert torch.equal(x.grad, expected.grad)
    assert step.report.offloaded_bytes <= 8 * KIB
    assert step.report.kept_bytes["budget"] >= 3 * 8 * KIB


def test_more_bundles_than_the_arena_has_slots_for(open_session: Opener, engine: str) -> None:
    session = open_session(
        engine=engine, **BUNDLED, window_bytes=8 * KIB, prefetch_bytes=8 * KIB,
        host_budget=16 * KIB, disk_budget=0,
    )  # fmt: skip
    expected, x = small(), small()
    chain(expected, 100).sum().backward()
    with session.step():
        chain(x, 100).sum().backward()
    assert torch.equal(x.grad, expected.grad)


def test_other_bytes_from_the_disk_are_found(open_session: Opener, engine: str) -> None:
    session = open_session(engine=engine, **BUNDLED, verify=True, prefetch_bytes=0)
    x = small()
    with session.step():
        loss = chain(x, 60).sum()
    drain(session)
    blocks = [b for b in session._hooks._blocks.living() if b.checksum is not None]
    assert len(blocks) >= 3
    for block in blocks:
        block.checksum ^= 1
    with pytest.raises(StorageError, match="checksum"):
        loss.backward()
    del loss, blocks, block
    with session.step():
        chain(small()).sum().backward()


def test_a_budget_of_the_device_takes_them_one_by_one(open_session: Opener, engine: str) -> None:
    """Where each byte counts, none is copied to wait for others."""
    session = open_session(engine=engine, **BUNDLED, device_budget="1MiB")
    with session.step() as step:
        chain(small()).sum().backward()
    assert step.report.offloaded_blocks == 40


def test_what_is_alive_is_counted(open_session: Opener, engine: str) -> None:
    """A bundle counts as a whole from its first member on, and never twice, as it is filled in the
    slot that it leaves by; an original counts for as long as it lives.
    """
    session = open_session(engine=engine, **BUNDLED, keep_last_bytes=1 << 20)
    with session.step() as step:
        held = [small() * 1]
        for _ in range(17):
            held.append(held[-1].sin())
    assert step.report.peak_live_bytes == 2 * 8 * KIB + 17 * 504
    assert step.report.peak_arena_bytes == 2 * 8 * KIB
    assert step.report.lanes["offload"].operations == 0


class WholeStorage(torch.autograd.Function):
    """Looks at what it saved by its place in the storage, and not by the tensor's."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x[3:])
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        assert x.storage_offset() == 3
        assert x.untyped_storage().nbytes() == 504
        return g * x.as_strided((126,), (1,), 0)


def test_a_member_comes_back_as_a_storage_of_its_own(session: Any) -> None:
    def step(context: Any) -> list[torch.Tensor]:
        x = small()
        with context():
            y = x
            for _ in range(40):
                y = WholeStorage.apply(y.sin())
            y.sum().backward()
        return [x.grad]

    assert_same(step, session)


@pytest.mark.parametrize("bundle_bytes", [8 * KIB, 0])
def test_a_storage_that_has_grown_is_another(
    open_session: Opener, any_engine: str, bundle_bytes: int
) -> None:
    """Without a new version, as ``resize_`` gives none."""
    session = open_session(engine=any_engine, **{**BUNDLED, "bundle_bytes": bundle_bytes})

    def step(context: Any) -> list[torch.Tensor]:
        first, second = rand(20).requires_grad_(), rand(100).requires_grad_()
        with context():
            x = torch.empty(0).set_((torch.arange(20.0) * 1).untyped_storage(), 0, (20,))
            loss = (first * x).sum()
            x.untyped_storage().resize_(400)
            grown = torch.empty(0).set_(x.untyped_storage(), 0, (100,))
            grown.data[20:] = 7.0
            loss = loss + (second * grown).sum()
            loss = loss + chain(small()).sum()
            del x, grown
            loss.backward()
        return [first.grad, second.grad]

    assert_same(step, session)


@pytest.mark.parametrize("asked", [False, True], ids=["not asked", "asked before"])
def test_a_forked_child(session: Any, asked: bool) -> None:
    """Is told that the bytes are its parent's, also those of a bundle that is not full."""
    with session.step():
        middle = chain(small(), 20)
        loss = chain(middle, 20).sum()
        kept = chain(small(), 5).sum()  # shares the last bundle, which is not full
    if asked:  # of a bundle that holds the end of what leads to the middle as well
        torch.autograd.grad(loss, middle, retain_graph=True)

    def body() -> None:
        for result in kept, middle.sum():
            with pytest.raises(StateError, match="forked"):
                result.backward()

    with in_child() as run:
        run(body)


def test_two_graphs_side_by_side_hold_no_more_than_one(session: Any) -> None:
    """Each bundle has members of both: what is of the other waits on the disk once more."""
    leaves = [small(), small()]
    with session.step():
        ends = list(leaves)
        for _ in range(300):
            ends = [y.sin() for y in ends]
        losses = [y.sum() for y in ends]
    del ends
    session.drain()
    for i, loss in enumerate(losses):
        loss.backward()
        session.drain()
        assert session.held_bytes <= 5 * 8 * KIB
        losses[i] = None
    expected = small()
    chain(expected, 300).sum().backward()
    assert_identical([expected.grad] * 2, [x.grad for x in leaves])


def test_steps_without_backward_share_a_bundle(session: Any) -> None:
    losses, x, expected = [], small(), small()
    for i in range(20):
        with session.step() as step:
            losses.append((x * i).sin().sum())
    assert session._hooks.live_blocks == 2
    assert step.report.kept_bytes == {"bundle": 504}
    for i, loss in enumerate(losses):
        loss.backward()
        (expected * i).sin().sum().backward()
    assert torch.equal(x.grad, expected.grad)
