"""The predicted order against the order autograd really asks in, and what that saves."""

import sys
from collections import deque
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import offload
from offload.hooks.prefetch import Prefetcher, Tape
from tests.doubles import LazyEngine
from tests.support import chain, drain, ints, net, rand

AMPLE = {"window_bytes": "8MiB", "prefetch_bytes": "8MiB"}


def asked_and_predicted(prefetcher: Prefetcher) -> tuple[list[int], list[int]]:
    """Ordinals of a step's one forward: as first asked for, and of these as predicted."""
    assert len(prefetcher._tapes) == 1
    asked = list(dict.fromkeys(ordinal for (_, ordinal), _ in prefetcher._asked))
    return asked, [i for i in prefetcher._tapes[0].order() if i in asked]


def branches(x: torch.Tensor) -> torch.Tensor:
    a = (x * 2).sin()
    b = (x * 3).cos() * a
    c = (a * b).exp() + (b @ a)
    return (c * a).sum()


def shared_projection(x: torch.Tensor) -> torch.Tensor:
    q, k, v = (x @ x.t()).chunk(3, dim=1)
    return ((q @ k.t()).softmax(-1) @ v).square().sum()


def model(x: torch.Tensor) -> torch.Tensor:
    return net(0, 12)(x).square().sum()


def several_saves_of_one_node(x: torch.Tensor) -> torch.Tensor:
    h = torch.nn.functional.layer_norm(x * 2, (12,), x[0] * 1, x[1] * 1)
    return torch.addcmul(h, h.sin(), h.cos()).sum()


@pytest.mark.parametrize("program", [branches, shared_projection, model, several_saves_of_one_node])
def test_predicted_order_is_the_real_one(open_session, any_engine: str, program) -> None:
    session = open_session(engine=any_engine)
    x = rand(12, 12).requires_grad_()
    with session.step():
        program(x).backward()
    asked, predicted = asked_and_predicted(session._hooks._prefetcher)
    assert len(asked) >= 4
    assert asked == predicted


def test_two_losses_of_one_forward(open_session, any_engine: str) -> None:
    """Each backward walks its own nodes; within each the order holds."""
    session = open_session(engine=any_engine)
    x = rand(12, 12).requires_grad_()
    with session.step():
        h = (x * 2).sin()
        first, second = (h.exp() * h).sum(), (h.cos() * h * x).sum()
        first.backward(retain_graph=True)
        count = len(session._hooks._prefetcher._asked)
        second.backward()
    prefetcher = session._hooks._prefetcher
    order = prefetcher._tapes[0].order()
    for part in (prefetcher._asked[:count], prefetcher._asked[count:]):
        ranks = [order.index(ordinal) for (_, ordinal), _ in part]
        assert ranks == sorted(ranks)


def test_only_the_first_request_of_a_chain_is_a_miss(open_session, any_engine: str) -> None:
    session = open_session(engine=any_engine, **AMPLE)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 10)
        drain(session)
        loss.backward()
    assert step.report.misses == 1
    assert step.report.hits + step.report.lates == 9


def test_nothing_is_read_ahead_without_a_window(open_session, any_engine: str) -> None:
    session = open_session(engine=any_engine, prefetch_bytes=0)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 10)
        drain(session)
        loss.backward()
    assert (step.report.misses, step.report.hits, step.report.lates) == (10, 0, 0)


@pytest.mark.parametrize("share", [3.0, 1.0, 0.01])
def test_no_more_is_read_ahead_than_the_window(open_session, any_engine: str, share: float) -> None:
    """What the operator at work has asked for counts, too; but while one storage is used another is
    read, and there is one to begin with, however large they are.
    """
    nbytes = 64 * 64 * 4
    session = open_session(engine=any_engine, prefetch_bytes=int(share * nbytes))
    x = rand(64, 64).requires_grad_()
    with session.step():
        loss = chain(x * 1, 10)
        drain(session)
        loss.backward()
    assert session._tiers.inbound.ahead.peak_bytes == 2 * nbytes


def test_each_block_is_read_once(open_session, any_engine: str) -> None:
    """Prefetching costs no bytes: what is read ahead is what is used."""
    session = open_session(engine=any_engine, prefetch_bytes=3 * 64 * 64 * 4)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = branches(x * 1)
        drain(session)
        loss.backward()
    drain(session)
    assert step.report.read_bytes == step.report.written_bytes


def micro_batches(session: offload.Session, x: torch.Tensor, order: str) -> offload.StepReport:
    """Three forwards, then their backwards; all bytes are on the disk in between."""
    with session.step() as step:
        losses = []
        for i in range(3):
            h = x * (i + 1.0)
            losses.append(branches(h))
            del h
        drain(session)
        for i in {"fifo": (0, 1, 2), "lifo": (2, 1, 0), "other": (1, 2, 0)}[order]:
            losses[i].backward()
            losses[i] = None
    return step.report


@pytest.mark.parametrize("order", ["fifo", "lifo", "other"])
def test_interleaved_micro_batches_are_learned(open_session, any_engine: str, order: str) -> None:
    """From the second step on, only the very first request finds its bytes on the disk."""
    session = open_session(engine=any_engine, **AMPLE)
    x = ints(48, 48).requires_grad_()
    micro_batches(session, x, order)
    for _ in range(2):
        assert micro_batches(session, x, order).misses <= 1


def pipeline(session: offload.Session, x: torch.Tensor, depth: int) -> offload.StepReport:
    """Six forwards, of which ``depth`` wait for their backward at a time, first in, first out; all
    that has left is on the disk before each backward.
    """
    with session.step() as step:
        waiting: deque[torch.Tensor] = deque()
        for i in range(6):
            h = x * (i + 1.0)
            waiting.append(chain(h, 6))
            del h
            drain(session)
            if len(waiting) == depth:
                waiting.popleft().backward()
        while waiting:
            drain(session)
            waiting.popleft().backward()
    return step.report


@pytest.mark.parametrize("keep_last_bytes", [0, 3 * 48 * 48 * 8])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forwards_between_backwards_are_learned(
    open_session, any_engine: str, depth: int, keep_last_bytes: int
) -> None:
    """What a backward will ask for is called back in the forward before it, at the latest."""
    session = open_session(engine=any_engine, keep_last_bytes=keep_last_bytes, **AMPLE)
    x = ints(48, 48).requires_grad_()
    pipeline(session, x, depth)
    for _ in range(2):
        assert pipeline(session, x, depth).misses == 0


@pytest.mark.parametrize("depth", [1, 3])
def test_forwards_in_flight_share_one_window(open_session, any_engine: str, depth: int) -> None:
    """Looking ahead into the next backward takes no more memory, and reads nothing twice."""
    slot_bytes = 5 * 4096  # for 48 * 48 doubles
    options = {"window_bytes": "8MiB", "prefetch_bytes": 4 * slot_bytes}
    session = open_session(engine=any_engine, **options)
    x = ints(48, 48).requires_grad_()
    pipeline(session, x, depth)
    for _ in range(2):
        report = pipeline(session, x, depth)
        assert report.misses == 0
        assert report.read_bytes <= report.written_bytes
    assert session._tiers.inbound.ahead.peak_bytes == 3 * slot_bytes  # beside the one in use


def test_saved_tensors_asked_for_twice_are_learned(open_session, any_engine: str) -> None:
    """Zero-bubble schedules run the backward of inputs first, and that of weights much later."""
    session = open_session(engine=any_engine, **AMPLE)
    x = rand(64, 64).requires_grad_()
    weight = rand(64, 64, seed=1).requires_grad_()

    def step() -> offload.StepReport:
        with session.step() as step:
            losses = [chain((x @ weight) * i, 4) for i in range(1, 4)]
            drain(session)
            for loss in losses:
                torch.autograd.grad(loss, x, retain_graph=True)
                drain(session)
            for loss in losses:
                torch.autograd.grad(loss, weight)
                drain(session)
        return step.report

    step()
    for _ in range(2):
        assert step().misses == 0


def test_what_is_still_being_written_is_kept_for_backward(real_engine) -> None:
    """The write ends between the moment the block is foreseen and the moment it is asked for."""
    session = offload.Session(
        min_offload_bytes=0,
        keep_last_bytes=0,
        _engine=LazyEngine(real_engine, reads=False),
        **AMPLE,
    )
    x = rand(64, 64).requires_grad_()
    with session, session.step() as step:
        h = chain_of(x, 4)
        h.register_hook(lambda grad: drain(session))  # after the first requests of backward
        loss = chain(h, 4)
        del h
        loss.backward()
        del loss
    assert (step.report.hits, step.report.misses) == (8, 0)
    assert step.report.read_bytes == 0
    assert step.report.forwarded_bytes == 8 * 64 * 64 * 4


def chain_of(x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        x = x.sin()
    return x


def test_checkpointed_blocks_are_learned(open_session, any_engine: str) -> None:
    """A boundary's place among the nodes is not known at first; the second step knows it."""
    session = open_session(engine=any_engine, **AMPLE)
    blocks = [net(i, 32) for i in range(5)]

    def step() -> offload.StepReport:
        with session.step() as step:
            h = rand(64, 32).requires_grad_() * 1
            for block in blocks:
                h = checkpoint(block, h, use_reentrant=False)
            loss = h.square().sum()
            del h
            drain(session)
            loss.backward()
        return step.report

    step()
    for _ in range(2):
        assert step().misses <= 1


def test_another_shape_is_not_mistaken_for_what_was_learned(session: offload.Session) -> None:
    """A step that saves other sizes follows its own order; results never depend on it."""
    for n in (8, 8, 16, 8, 24):
        x = ints(n, n).requires_grad_()
        branches(x / 16).backward()
        expected, x.grad = x.grad, None
        with session.step():
            branches(x / 16).backward()
        assert torch.equal(x.grad, expected)


def test_a_wrong_guess_does_not_spoil_the_steps_after(open_session, any_engine: str) -> None:
    """What was read ahead for a graph that is kept but not used again must not fill the window."""
    nbytes = 64 * 64 * 4
    session = open_session(engine=any_engine, prefetch_bytes=4 * nbytes)
    x = rand(64, 64).requires_grad_()

    def step(backward: int) -> tuple[offload.StepReport, list[torch.Tensor]]:
        with session.step() as step:
            losses = []
            for _ in range(2):
                losses.append(chain(x * 1, 6))
            drain(session)
            for i in range(backward):
                losses[i].backward()
        return step.report, losses

    step(2)
    kept = [step(1)[1] for _ in range(3)]  # learned: loss 1 follows loss 0; it does not
    x.grad = None
    report, losses = step(2)
    assert report.misses <= 4, "nothing is read ahead any more"
    del kept, losses


def test_one_long_step_does_not_pile_up(open_session, any_engine: str) -> None:
    """A step around a whole training loop holds no more than its newest forwards."""
    session = open_session(engine=any_engine)
    x = rand(16).requires_grad_()
    prefetcher = session._hooks._prefetcher
    with session.step():
        for _ in range(300):
            chain(x, 2).backward()
    assert len(prefetcher._tapes) < 300
    assert len(prefetcher._asked) < 600


def test_many_small_backwards_look_at_a_bounded_number_each(open_session, any_engine: str) -> None:
    """Each begins a walk of its own, past all that is there already, or that has been used up."""
    session = open_session(engine=any_engine, **AMPLE)
    looked_at = [0]

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is Prefetcher.asked.__code__:
            looked_at.append(0)
        elif event == "call" and frame.f_code is Tape.ticket.__code__:
            looked_at[-1] += 1

    for _ in range(2):  # in the predicted order, and in one that was learned
        x = rand(16).requires_grad_()
        with session.step():
            losses = [(x * i).sin().sum() for i in range(400)]
            sys.setprofile(count)
            try:
                for loss in losses:
                    loss.backward()
            finally:
                sys.setprofile(None)
    assert len(looked_at) > 800
    assert max(looked_at) <= 128


def test_small_tensors_take_whole_slots_of_the_windows(open_session, any_engine: str) -> None:
    """A slot is a page at least: that is what the windows count."""
    page_bytes = 4096
    session = open_session(
        engine=any_engine, window_bytes=2 * page_bytes, prefetch_bytes=4 * page_bytes
    )
    x = rand(16).requires_grad_()
    for _ in range(2):
        with session.step() as step:
            loss = chain(x * 1, 100)
            drain(session)
            loss.backward()
        assert torch.equal(torch.autograd.grad(chain(x * 1, 100), x)[0], x.grad)
        x.grad = None
        # The windows, and what the operators at work have asked for.
        assert 0 < step.report.peak_arena_bytes <= (2 + 4 + 2) * page_bytes


def test_what_somebody_lets_go_of_before_it_is_asked_for_is_there(
    open_session, any_engine: str
) -> None:
    """Held when the prefetcher looks at it, it need not be read; but then it has to stay."""
    session = open_session(engine=any_engine, **AMPLE)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        holding = [x * 2]
        y = holding[0].sin()  # saves what is held
        y.register_hook(lambda _: holding.clear())
        z = y.sin()  # saves y, which backward asks for first
        del y
        drain(session)
        z.sum().backward()
    assert step.report.misses == 1
    assert torch.equal(x.grad, (2 * (x * 2).cos() * (x * 2).sin().cos()).detach())
