"""What a plan keeps: what of it leaves after all, and comes back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from offload.engines import PAGE_BYTES
from offload.errors import ModifiedInPlaceError
from offload.session import Session
from offload.tiers import kept as keeping
from tests.conftest import Opener
from tests.planner.test_overruns import OPTIONS, Net, at, loss_of, of_plain
from tests.support import assert_identical, grads, rand


class Kept(NamedTuple):
    """A step under a plan that keeps everything, between its forward and its backward."""

    session: Session
    model: nn.Module
    expected: list[Tensor]

    def send(self) -> int:
        """Send out what was to stay, as far as it can; how many storages that were."""
        tiers, count = self.session._tiers, 0
        with tiers.lock:
            while tiers.outbound.keeping.send_oldest():
                count += 1
        return count


@contextlib.contextmanager
def opened(open_session: Opener, **options: Any) -> Iterator[Kept]:
    found = of_plain(Net)
    model = Net()
    loss_of(model).backward()
    expected = [g.clone() for g in grads(model)]
    model.zero_grad()
    session = open_session(**OPTIONS, device_budget=at(found, 2.0), **options)
    with session.apply(model, found.plan(at(found, 2.0))):
        yield Kept(session, model, expected)


@pytest.fixture
def kept(open_session: Opener) -> Iterator[Kept]:
    with opened(open_session, verify=True) as kept:
        yield kept


def test_it_comes_back_as_often_as_it_is_wanted(kept: Kept) -> None:
    with kept.session.step() as step:
        loss = loss_of(kept.model)
        live_bytes = kept.session._tiers.gate.used_bytes
        assert kept.send() > 5
        assert kept.session._tiers.gate.used_bytes < live_bytes / 4
        loss.backward(retain_graph=True)
        assert kept.session._tiers.disk.store.used_bytes > 0
        assert_identical(kept.expected, grads(kept.model))
        kept.model.zero_grad()
        loss.backward()
    assert_identical(kept.expected, grads(kept.model))
    assert step.report.offloaded_bytes == step.report.lanes["spill"].nbytes
    assert kept.session._tiers.disk.store.used_bytes == 0


def test_it_comes_back_after_the_session(kept: Kept) -> None:
    with kept.session.step():
        loss = loss_of(kept.model)
        assert kept.send() > 5
    kept.session.close()
    loss.backward()
    assert_identical(kept.expected, grads(kept.model))


def test_what_somebody_holds_stays(kept: Kept) -> None:
    with kept.session.step():
        results: list[Tensor] = []
        loss = kept.model(rand(1024, 16), results).square().mean()
        kept.send()
        assert kept.send() == 0
        del results
        assert kept.send() >= 4
        loss.backward()
    assert_identical(kept.expected, grads(kept.model))


def test_what_is_empty_for_a_while_stays(kept: Kept) -> None:
    with kept.session.step():
        x = rand(64, 64).requires_grad_()
        storage = (y := x * 1).untyped_storage()
        loss = y.sin().sum()
        del y
        held, nbytes = storage.clone(), storage.nbytes()
        storage.resize_(0)
        assert kept.send() == 0
        storage.resize_(nbytes)
        storage.copy_(held)
        loss.backward()
    assert_identical([rand(64, 64).cos()], [x.grad] if x.grad is not None else [])


def test_what_was_modified_is_not_sent_and_backward_says_so(kept: Kept) -> None:
    with kept.session.step():
        first, second = rand(64, 64).requires_grad_() * 1, rand(64, 64).requires_grad_() * 1
        losses = [first.sin().sum(), second.sin().sum()]
        with torch.no_grad():
            first.add_(1)
        del first
        assert kept.send() == 0  # the second is held
        counter = second.detach()
        counter.data = torch.empty(0)  # its version counter without its memory
        del second
        assert kept.send() == 1
        with torch.no_grad():
            counter.add_(1)
        for loss in losses:
            with pytest.raises((RuntimeError, ModifiedInPlaceError), match="modified by an inpl"):
                loss.backward()


def test_a_disk_that_is_full_leaves_it_in_memory(kept: Kept) -> None:
    kept.session._tiers.disk.store.limit_bytes = 0
    with kept.session.step():
        loss = loss_of(kept.model)
        assert kept.send() == 0
        loss.backward()
    assert_identical(kept.expected, grads(kept.model))


def test_pieces_are_written_through_all_the_room_that_there_is(open_session: Opener) -> None:
    with opened(open_session) as kept, kept.session.step() as step:
        loss = (rand(32, 1024).requires_grad_() * 1).sin().sum()
        tiers = kept.session._tiers
        tiers.gate.limit_bytes = tiers.gate.used_bytes + 10 * PAGE_BYTES
        assert kept.send() == 1
        loss.backward()
    assert step.report.lanes["spill"].operations == 4  # of 32 pages


def test_many_tensors_of_one_storage_take_no_more_work_each(kept: Kept) -> None:
    def work(number: int) -> int:
        """The instructions of Python that it takes to keep ``number`` views of one storage."""
        keeping = kept.session._tiers.outbound.keeping
        views = rand(number).unbind()
        storage = views[0].untyped_storage()
        done = 0

        def count(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal done
            frame.f_trace_opcodes = True
            done += event == "opcode"
            return count

        sys.settrace(count)
        try:
            held = [keeping.add(view, storage) for view in views]
        finally:
            sys.settrace(None)
        assert len(held) == number
        return done

    assert work(4000) < 20 * work(250)


def test_a_backward_after_the_session_leaves_what_it_kept(kept: Kept) -> None:
    with kept.session.step():
        loss = loss_of(kept.model)
    kept.session.close()
    kept.session._tiers.gate.limit_bytes = 0
    loss.backward(retain_graph=True)
    assert_identical(kept.expected, grads(kept.model))


def test_an_interrupt_at_any_line_leaves_all_of_it_there(kept: Kept) -> None:
    tiers, left = kept.session._tiers, 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal left
        if frame.f_code.co_filename != keeping.__file__:
            return None
        left -= event == "line"
        if not left:
            raise KeyboardInterrupt
        return trace

    for line in range(1, 400):
        left = line
        with kept.session.step():
            kept.model.zero_grad()
            loss = loss_of(kept.model)
            before = sys.gettrace()
            sys.settrace(trace)
            with contextlib.suppress(KeyboardInterrupt), tiers.lock:
                for _ in range(2):  # the second has several saved tensors
                    tiers.outbound.keeping.send_oldest()
            sys.settrace(before)
            kept.send()
            loss.backward()
        assert_identical(kept.expected, grads(kept.model))
        del loss
        assert tiers.disk.store.used_bytes == 0
        if left > 0:
            return
    pytest.fail("there are more lines than that")


def test_the_space_of_an_interrupted_write_is_not_used_again(kept: Kept) -> None:
    tiers = kept.session._tiers
    engine = tiers.common.engine

    class Waited:
        """A write that takes until it is let, and whose first wait is interrupted."""

        start_ns = end_ns = 0
        completed = False

        def done(self) -> bool:
            return self.completed

        def cancel(self) -> bool:
            return False

        def wait(self) -> bool:
            if not self.completed:
                raise KeyboardInterrupt
            return True

    with kept.session.step():
        loss = loss_of(kept.model)
        request = Waited()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(engine), "write", lambda *_: request)
            with pytest.raises(KeyboardInterrupt):
                kept.send()
        assert tiers.disk.store.used_bytes > 0
        request.completed = True
        tiers.poll()
        assert tiers.disk.store.used_bytes == 0
        loss.backward()
    assert_identical(kept.expected, grads(kept.model))
