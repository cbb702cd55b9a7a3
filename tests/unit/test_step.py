"""A step that is broken off: whatever line it is at, everything is as it was before."""

import contextlib
import dis
import functools
import gc
import itertools
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import offload
from offload.blocks.block import Block, VersionWitness
from offload.blocks.placement import Placement
from offload.blocks.registry import Registry
from offload.engines.aio import AioEngine
from offload.engines.budget import Budget
from offload.engines.freelist import FreeList
from offload.engines.store import Extent
from offload.tensors.live import LiveBytes
from tests.conftest import Opener
from tests.support import assert_identical, grads, net, rand

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="has no table of handlers")
_top = torch._C._autograd._top_saved_tensors_default_hooks


def hooks() -> list[Any]:
    """The pairs that are active on this thread, from the top."""
    found = []
    while (pair := _top(False)) is not None:
        found.append(pair)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(found):
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)
    return found


@functools.cache
def opcodes(code: CodeType) -> dict[int, tuple[str, object]]:
    """By offset, the name, and what handles an exception that is raised there."""
    handlers = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return {
        i.offset: (i.opname, [h for h in handlers if h.start <= i.offset < h.end][-1:])
        for i in dis.get_instructions(code)
    }


class Interrupt:
    """Raises ``KeyboardInterrupt`` at the ``at``-th moment at which the interpreter might: it looks
    for signals when a function begins, when a call has returned, and when a loop goes back. A trace
    function only raises at the next instruction: not where that has another handler.
    """

    def __init__(self, at: int, within: tuple[str, ...]) -> None:
        self._left, self._within = at, within
        self.where: str | None = None

    def trace(self, frame: FrameType, event: str, arg: object) -> Any:
        """For ``sys.settrace``."""
        code = frame.f_code
        if not any(part in code.co_filename for part in self._within) or code.co_name == "__del__":
            return None  # Python itself drops what is raised in a __del__
        known = opcodes(frame.f_code)
        last: tuple[str, object] = ("", None)

        def in_frame(frame: FrameType, event: str, arg: object) -> Any:
            nonlocal last
            if event == "opcode":
                (before, handler), last = last, known[frame.f_lasti]
                looks = before.startswith("CALL") or "JUMP_BACKWARD" in before
                if looks and handler == last[1]:
                    self._moment(frame)
            return in_frame

        frame.f_trace_opcodes = True
        self._moment(frame)
        return in_frame

    def _moment(self, frame: FrameType) -> None:
        self._left -= 1
        if self._left == 0:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}, {frame.f_lasti}"
            sys.settrace(None)
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


def every_interrupt(within: tuple[str, ...], run: Any) -> int:
    """Call ``run(interrupt)`` with interrupts at every moment; how many there are."""
    for at in itertools.count(1):
        interrupt = Interrupt(at, within)
        run(interrupt)
        if interrupt.where is None:
            return at - 1
    raise AssertionError


OURS = ("/offload/", "/torch/autograd/graph.py", "/contextlib.py")


@pytest.mark.parametrize("verify_recompute", [False, True])
def test_an_interrupt_at_any_line_leaves_nothing_behind(
    open_session: Opener, verify_recompute: bool
) -> None:
    session = open_session(verify_recompute=verify_recompute)
    model, x = net(), rand(8, 16)
    model(x).sum().backward()
    expected = grads(model)

    def outer_pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with saved_tensors_hooks(outer_pack, outer_pack):
        before = hooks()

        def run(interrupt: Interrupt) -> None:
            with session.step():  # so that each run has as many moments
                pass
            with contextlib.suppress(KeyboardInterrupt), interrupt.armed(), session.step():
                pass
            assert hooks() == before, interrupt.where
            assert not session._open_steps, interrupt.where
            assert session._running_step() is None, interrupt.where
            assert offload.recompute.verify.current_verifier() is None, interrupt.where

        assert every_interrupt(OURS, run) > 50
    model.zero_grad()
    with session.step() as step:
        model(x).sum().backward()
    assert_identical(expected, grads(model))
    assert step.report.offloaded_blocks > 0
    session.close()


def test_an_interrupt_inside_of_a_step(open_session: Opener) -> None:
    """Also within the contexts of others, whose hooks it leaves above ours."""
    session = open_session()
    model, x = net(), rand(8, 16)

    def run(interrupt: Interrupt) -> None:
        with contextlib.suppress(KeyboardInterrupt), session.step(), interrupt.armed():
            with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
                pass
            with offload.Session(min_offload_bytes=0) as other, other.step():
                pass
        assert hooks() == [], interrupt.where
        with session.step():
            model(x).sum().backward()

    assert every_interrupt(("/torch/autograd/graph.py", "/offload/step.py"), run) > 10


def test_an_interrupt_of_a_reservation() -> None:
    def run(interrupt: Interrupt) -> None:
        budget = Budget(100)
        with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
            budget.reserve(60)
        assert budget.used_bytes == 0, interrupt.where

    assert every_interrupt(("/offload/engines/budget.py",), run) > 3


def test_an_interrupt_while_what_has_died_is_counted() -> None:
    """Ledgers of bytes, space, blocks and storages: each death counts once."""

    def run(interrupt: Interrupt) -> None:
        budget, registry, live, free = Budget(100), Registry(), LiveBytes(), FreeList(100)
        tensor = torch.zeros(4)
        storage = tensor.untyped_storage()
        for key in (1, 2):
            registry.add((key, 0), Block(storage, VersionWitness(tensor), Placement.DISK))
        del storage
        live.track(tensor.untyped_storage())
        del tensor
        held = [budget.reserve(n) for n in (50, 30)]
        held.clear()
        owners = {n: Extent() for n in (10, 20, 30, 40)}
        for n, owner in owners.items():
            free.take(n, owner)
        del owner
        for n in (10, 40, 20, 30):
            del owners[n]
        with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
            _ = budget.used_bytes, len(registry), live.alive_bytes
            free.settle()
            free.grow(50)
            free.take(150, extent := Extent())
            free.grow(50)
        extent = None  # noqa: F841
        free.settle()
        figures = budget.used_bytes, len(registry), live.alive_bytes
        assert figures == (0, 0, 0), interrupt.where
        assert free._lengths == [free.size_bytes], interrupt.where
        assert free.free_bytes == free.size_bytes, interrupt.where

    ledgers = ("engines/budget", "blocks/registry", "tensors/live", "engines/freelist")
    assert every_interrupt(tuple(f"/offload/{name}.py" for name in ledgers), run) > 20


@pytest.mark.parametrize("cancel", [False, True])
def test_an_interrupt_of_a_request_leaves_it_to_be_waited_for(tmp_path: Any, cancel: bool) -> None:
    """No lock of it stays locked. In the native engine there is no Python to be interrupted."""
    engine = AioEngine(str(tmp_path), threads=1, block_bytes=4096)
    slot = engine.arena(4096).allocate(4096)
    assert slot is not None

    def run(interrupt: Interrupt) -> None:
        begins = threading.Event()
        # It has not begun, or is not done, when it is asked about.
        delay = begins.wait if cancel else functools.partial(time.sleep, 0.01)
        engine._inbox.loop.call_soon_threadsafe(delay)
        request = engine.write(slot, 0)
        with contextlib.suppress(KeyboardInterrupt), interrupt.armed():
            if cancel:
                request.cancel()
            else:
                request.wait()
        begins.set()

        def wait() -> None:
            with contextlib.suppress(OSError):
                request.wait()

        waits = threading.Thread(target=wait, daemon=True)
        waits.start()
        waits.join(20)
        assert not waits.is_alive(), interrupt.where
        assert request.done(), interrupt.where

    assert every_interrupt(("/offload/engines/aio.py", "/threading.py"), run) > 1
    engine.close()


@pytest.mark.parametrize("rules", [{"0": "recompute+disk", "1": "selective", "2": "disk"}, "auto"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=8)
@given(part=st.floats(0, 1), before=st.integers(0, 7))
@example(part=0.99, before=4)  # in the solver
def test_an_interrupt_of_training(tmp_path: Any, rules: Any, part: float, before: int) -> None:
    """At any moment of ours in a step, with what it recomputes: the next steps are as ever."""
    torch.manual_seed(0)
    model = nn.Sequential(*(net() for _ in range(3)))
    x = rand(8, 16)
    model(x).sum().backward()
    expected = grads(model)
    options = {"disk_dir": tmp_path, "min_offload_bytes": 0, "keep_last_bytes": 0}
    with offload.Session(**options, device_budget="64KiB") as session:

        def step(interrupt: Interrupt) -> None:
            model.zero_grad()
            with interrupt.armed(), session.step():
                model(x).sum().backward()

        with session.apply(model, rules):
            for _ in range(before):
                step(Interrupt(0, OURS))
            whole = Interrupt(0, OURS)
            step(whole)
            interrupt = Interrupt(1 + int(part * -whole._left), OURS)
            with contextlib.suppress(KeyboardInterrupt):
                step(interrupt)
            assert hooks() == [], interrupt.where
            for _ in range(2):
                step(Interrupt(0, OURS))
                assert_identical(expected, grads(model))
        gc.collect()
        session.drain()
        assert session._hooks.live_blocks == 0, interrupt.where
        assert session.held_bytes == 0, interrupt.where
        assert session._tiers.outbound.window.used_bytes == 0, interrupt.where


def test_an_exception_takes_what_was_left_above(open_session: Opener) -> None:
    session = open_session()
    left = saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach)
    with pytest.raises(ZeroDivisionError), session.step():
        left.__enter__()
        1 / 0  # noqa: B018
    assert hooks() == []


def test_by_an_exit_stack_and_by_hand(open_session: Opener) -> None:
    session = open_session()
    with contextlib.ExitStack() as stack:
        step = stack.enter_context(session.step())
        assert len(hooks()) == 1
        assert hasattr(step, "__exit__")
        assert len(hooks()) == 1, "to look at it is not to leave"
    assert hooks() == []
    step = session.step()
    leave = step.__exit__
    step.__enter__()
    assert len(hooks()) == 1
    leave(None, None, None)
    assert hooks() == []
    del leave
    step = session.step()
    step.__enter__()
    step.__exit__(None, None, None)
    assert hooks() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not session._open_steps
