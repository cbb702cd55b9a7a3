"""A saved tensor changed before its backward: refused as torch does, or served as it was saved."""

import pytest
import torch

from offload import Session
from offload.errors import ModifiedInPlaceError
from tests.support import assert_same


@pytest.mark.parametrize("saved", ["input", "output"])
def test_changed_after_it_was_saved(session: Session, saved: str) -> None:
    """The change is found although hooks switch torch's own check off."""
    x = torch.arange(1.0, 5.0, requires_grad=True)
    with session.step():
        if saved == "input":
            changed = x * 1
            result = changed.sin()
        else:
            result = changed = x.exp()
        changed.mul_(2)
        with pytest.raises(
            ModifiedInPlaceError, match=r"modified by an inplace operation.*expected version"
        ):
            result.sum().backward()


def test_changed_through_a_view_of_it(session: Session) -> None:
    """Views share the version of their base."""
    x = torch.ones(6, requires_grad=True)
    with session.step():
        a = x * 1
        result = a.sin()
        a[2:4].zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


@pytest.mark.parametrize("keep_last_bytes", [0, 1 << 20])
@pytest.mark.parametrize("min_offload_bytes", [0, 1 << 20])
def test_found_wherever_the_tensor_waits(
    open_session, engine: str, keep_last_bytes: int, min_offload_bytes: int
) -> None:
    """On disk, in the tail that is kept, or passed through as too small: the answer is the same."""
    session = open_session(
        engine=engine, keep_last_bytes=keep_last_bytes, min_offload_bytes=min_offload_bytes
    )
    x = torch.ones(64, requires_grad=True)
    with session.step():
        a = x * 1
        result = a.sin()
        a.add_(1)
    with pytest.raises(ModifiedInPlaceError):
        result.sum().backward()


def test_changed_before_it_is_saved_and_after_it_was_used(session: Session) -> None:
    """In-place operations that torch allows are allowed, and each version is served as it was."""

    def step(context):
        x = torch.linspace(0, 1, 32, requires_grad=True)
        with context():
            a = x * 2
            a.mul_(3)
            b = a.sin()
            del a
            c = b + 1  # saves nothing
            c.mul_(2)
            c.relu_()
            c.square().sum().backward()
        return [x.grad]

    assert_same(step, session)


def test_two_versions_of_one_storage(session: Session) -> None:
    """The bytes of version 0 are not those of version 1, although the storage is one."""
    x = torch.ones(8, requires_grad=True)
    buffer = torch.full((8,), 2.0)
    with session.step():
        first = (x * buffer).sum()
        with torch.no_grad():
            buffer.fill_(5.0)
        second = (x * buffer).sum()
        second.backward()
        assert torch.equal(x.grad, torch.full((8,), 5.0))
        with pytest.raises(ModifiedInPlaceError):
            first.backward()


def test_the_optimizer_step_comes_between(session: Session) -> None:
    """A parameter changed before backward is refused too; it never left memory."""
    w = torch.nn.Parameter(torch.ones(4, 4))
    x = torch.ones(4, 4, requires_grad=True)
    with session.step():
        loss = (x @ w).sum()
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(ModifiedInPlaceError):
            loss.backward()


class ScalesWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h * 1

    @staticmethod
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        h.mul_(2)  # as kernels do that write a gradient over their input
        return g * h


def test_backward_works_in_place_on_what_it_saved(session: Session) -> None:
    """A backward may use its saved tensor as scratch memory."""

    def step(context):
        x = torch.linspace(1, 2, 64, requires_grad=True)
        with context():
            ScalesWhatItSaved.apply(x * 1).sum().backward()
        return [x.grad]

    assert_same(step, session)


@pytest.mark.parametrize("keep_last_bytes", [0, 1 << 20])
def test_backward_spoils_what_another_one_needs(
    open_session, engine: str, keep_last_bytes: int
) -> None:
    """torch refuses this; the exact gradient is right too, the spoilt one is wrong."""
    session = open_session(engine=engine, keep_last_bytes=keep_last_bytes)
    x = torch.full((1024,), 3.0, requires_grad=True)
    with session.step():
        h = x * 1
        a = h * h
        loss = a.sum() + ScalesWhatItSaved.apply(h).sum()
        del h, a
        try:
            loss.backward()
        except RuntimeError as e:
            assert "modified by an inplace operation" in str(e)
            return
    assert torch.equal(x.grad, torch.full((1024,), 12.0))


@pytest.mark.parametrize("keep_last_bytes", [0, 1 << 20])
def test_backward_spoils_what_it_needs_again(
    open_session, engine: str, keep_last_bytes: int
) -> None:
    """The second backward over a retained graph must not see what the first one did."""
    session = open_session(engine=engine, keep_last_bytes=keep_last_bytes)
    x = torch.full((1024,), 3.0, requires_grad=True)
    with session.step():
        loss = ScalesWhatItSaved.apply(x * 1).sum()
        loss.backward(retain_graph=True)
        first = x.grad.clone()
        x.grad = None
        try:
            loss.backward()
        except RuntimeError as e:
            assert "modified by an inplace operation" in str(e)
            return
    assert torch.equal(x.grad, first)
