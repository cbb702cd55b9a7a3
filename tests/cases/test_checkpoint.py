"""Recomputation inside, outside and around a step."""

import contextlib

import pytest
import torch
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from offload import Session
from tests.support import assert_same, grads, in_threads, net, rand


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointed_blocks_inside_a_step(session: Session, use_reentrant: bool) -> None:
    """The boundaries go to the disk, the regions are recomputed."""

    def step(context):
        blocks = [net(i) for i in range(3)]
        x = rand(4, 16, seed=1).requires_grad_()
        with context():
            h = x
            for block in blocks:
                h = checkpoint(block, h, use_reentrant=use_reentrant)
            h.pow(2).sum().backward()
        return [x.grad, *grads(*blocks)]

    assert_same(step, session)
    assert session.report().offloaded_blocks > 0


def test_step_inside_a_checkpointed_function(session: Session) -> None:
    """A step around part of a region packs alike in forward and recomputation."""

    def step(context):
        model = net()
        x = torch.ones(4, 16, requires_grad=True)

        def block(h):
            h = model[0](h)
            with context():
                h = model[2](model[1](h))
            return model[4](model[3](h))

        for _ in range(2):
            checkpoint(block, x, use_reentrant=False).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)


@pytest.mark.parametrize("where", ["within", "after", "thread", "closed"])
def test_step_inside_a_checkpointed_function_inside_a_step(session: Session, where: str) -> None:
    """It takes the place of the recomputation, and does so again wherever backward runs."""

    def step(context):
        model = net()
        x = torch.ones(4, 16, requires_grad=True)

        def block(h):
            h = model[1](model[0](h))
            with context():
                h = model[2](h)
                with context():
                    h = model[3](h)
            return model[4](h)

        with context():
            loss = checkpoint(block, x, use_reentrant=False).sum()
            if where == "within":
                loss.backward()
            elif where == "thread":
                in_threads(loss.backward)
        if where == "closed" and context == session.step:
            session.close()
        if where in ("after", "closed"):
            loss.backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)
    assert session.report().steps == 1


def test_offload_instead_of_recompute(session: Session) -> None:
    """As ``context_fn`` a step takes a region's saves: the forward runs once."""
    calls = []

    def step(context):
        model = net()
        x = torch.ones(4, 16, requires_grad=True)
        calls.clear()

        def block(h):
            calls.append(1)
            return model(h)

        out = checkpoint(
            block, x, use_reentrant=False, context_fn=lambda: (context(), contextlib.nullcontext())
        )
        out.sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)
    assert len(calls) == 1


def test_nested_checkpoints(session: Session) -> None:
    """Regions within regions."""

    def step(context):
        model = net()
        x = rand(4, 16).requires_grad_()

        def inner(h):
            return checkpoint(model, h, use_reentrant=False).sin()

        with context():
            checkpoint(inner, x, use_reentrant=False).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)


def test_random_state(session: Session) -> None:
    """Dropout is recomputed with the same mask, and the generator is where it would be."""

    def step(context):
        blocks = [
            torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.3)) for _ in range(4)
        ]
        torch.manual_seed(5)
        for block in blocks:
            torch.nn.init.normal_(block[0].weight, std=0.1)
        x = torch.ones(4, 32, requires_grad=True)
        with context():
            h = x
            for block in blocks:
                h = checkpoint(block, h, use_reentrant=False)
            h.sum().backward()
            after = torch.get_rng_state()
        return [after, torch.rand(3), x.grad, *grads(*blocks)]

    assert_same(step, session)


def test_autocast(session: Session) -> None:
    """Backward and recomputation run outside the autocast block of the forward."""

    def step(context):
        model = net()
        x = rand(4, 16, seed=1).requires_grad_()
        with context():
            with torch.autocast(session.config.device.type, dtype=torch.bfloat16):
                h = checkpoint(model, x, use_reentrant=False)
                loss = (model[2](h.float()) ** 2).sum()
            loss.backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)


@pytest.mark.parametrize("early_stop", [True, False])
def test_early_stop(session: Session, early_stop: bool) -> None:
    """Recomputation may stop at the last save or run to its end."""

    def step(context):
        model = net()
        x = torch.ones(2, 16, requires_grad=True)
        with set_checkpoint_early_stop(early_stop), context():
            checkpoint(lambda h: model(h).clone() + 1, x, use_reentrant=False).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)


def test_error_in_recomputation(session: Session) -> None:
    """The user's own error type comes through, and the next step works."""
    calls = []

    def bad(h):
        calls.append(1)
        if len(calls) == 2:
            raise LookupError("in recompute")
        return h.sin().exp()

    x = torch.ones(3, requires_grad=True)
    with pytest.raises(LookupError, match="in recompute"), session.step():
        checkpoint(bad, x, use_reentrant=False).sum().backward()
    test_early_stop(session, True)


def test_boundary_changed_in_place(session: Session) -> None:
    """A region's input that is changed before the recomputation is found."""
    x = torch.ones(8, requires_grad=True)
    with session.step():
        h = x * 1
        out = checkpoint(lambda h: h.sin().exp(), h, use_reentrant=False)
        h.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
