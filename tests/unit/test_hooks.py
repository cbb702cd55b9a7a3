"""Our pair of hooks among others, on other threads, in other processes, left in other orders."""

import contextlib
import os
import threading
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import offload
from offload import Session
from offload.errors import StateError
from tests.conftest import wait_until
from tests.support import assert_same, chain, grads, in_child, net, rand, scratch_files

top = torch._C._autograd._top_saved_tensors_default_hooks


class Counting(saved_tensors_hooks):
    """A user's own pair: counts, and gives back what it was given."""

    def __init__(self) -> None:
        self.packed: list[int] = []
        self.unpacked: list[int] = []
        super().__init__(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.packed.append(tensor.numel())
        return tensor.detach()

    def _unpack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.unpacked.append(tensor.numel())
        return tensor


def program(context: Any) -> list[torch.Tensor]:
    model = net()
    x = rand(4, 16).requires_grad_()
    with context():
        checkpoint(model, (x * 2).sin(), use_reentrant=False).square().sum().backward()
        model(x * 3).square().sum().backward()
    return [x.grad, *grads(model)]


def test_what_stays_goes_to_the_pair_before_ours(open_session, engine: str) -> None:
    session = open_session(engine=engine, min_offload_bytes=100, bundle_bytes=0)
    small, large = torch.ones(4, requires_grad=True), torch.ones(50, requires_grad=True)
    outer = Counting()
    with outer:
        with session.step() as step:
            loss = (small * small).sum() + (large * large).sum()
        again = (small * small).sum()
        loss.backward()
        again.backward()
    assert outer.packed == [4, 4, 4, 4]
    assert outer.unpacked == outer.packed
    assert step.report.offloaded_bytes == 200


@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("kind", ["counting", "save_on_cpu", "session", "mutation"])
def test_same_gradients_among_others(open_session, engine: str, kind: str, where: str) -> None:
    session, second = open_session(engine=engine), open_session(engine=engine)
    other = {
        "counting": Counting,
        "save_on_cpu": save_on_cpu,
        "session": lambda: second.step(),
        "mutation": torch.autograd.graph.allow_mutation_on_saved_tensors,
    }[kind]

    @contextlib.contextmanager
    def both() -> Any:
        contexts = [session.step, other]
        first, then = contexts[::-1] if where == "outside" else contexts
        with first(), then():
            yield

    torch.manual_seed(0)
    expected = program(contextlib.nullcontext)
    got = program(both)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_nested_steps_of_one_session_are_one(session: Session) -> None:
    x = rand(16).requires_grad_()
    with session.step() as outer:
        pair = top(False)
        with session.step() as inner:
            assert top(False) is pair or top(False) == pair
            loss = chain(x, 3)
        assert top(False) == pair
        loss = loss + chain(x, 2)
        loss.backward()
    assert top(False) is None
    assert inner.report.offloaded_blocks == outer.report.offloaded_blocks
    assert session.report().steps == 1


def test_a_step_is_entered_once(session: Session) -> None:
    step = session.step()
    with step:
        pass
    with pytest.raises(StateError, match=r"call session.step\(\) for each"), step:
        pass
    assert top(False) is None


def test_left_while_another_pair_is_on_top(session: Session) -> None:
    """It would take the other pair away: refused, nothing is removed, and it can be left later."""
    step, outer = session.step(), Counting()
    step.__enter__()
    outer.__enter__()
    with pytest.raises(StateError, match="reverse order"):
        step.__exit__(None, None, None)
    assert top(False)[0] == outer.pack_hook
    outer.__exit__(None, None, None)
    step.__exit__(None, None, None)
    assert top(False) is None
    with session.step() as step:
        chain(rand(8).requires_grad_(), 2).backward()
    assert step.report.offloaded_blocks == 2


def test_two_sessions_left_in_the_wrong_order(open_session, engine: str) -> None:
    first, second = open_session(engine=engine), open_session(engine=engine)
    a, b = first.step(), second.step()
    a.__enter__()
    b.__enter__()
    with pytest.raises(StateError):
        a.__exit__(None, None, None)
    b.__exit__(None, None, None)
    a.__exit__(None, None, None)
    assert top(False) is None


def test_left_on_another_thread(session: Session) -> None:
    step = session.step()
    step.__enter__()
    caught: list[BaseException] = []

    def leave() -> None:
        try:
            step.__exit__(None, None, None)
        except StateError as e:
            caught.append(e)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "on the thread that entered it" in str(caught[0])
    assert top(False) is not None
    step.__exit__(None, None, None)
    assert top(False) is None


def test_other_threads_are_not_hooked(session: Session) -> None:
    x = rand(64).requires_grad_()
    with session.step() as step:
        thread = threading.Thread(target=lambda: chain(x, 3))
        thread.start()
        thread.join()
    assert step.report.offloaded_blocks == 0


def test_backward_on_another_thread(session: Session) -> None:
    def step(context: Any) -> list[torch.Tensor]:
        x = rand(64).requires_grad_()
        with context():
            loss = chain(x * 2, 4)
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        return [x.grad]

    assert_same(step, session)


def test_generator_suspended_inside_a_step(session: Session) -> None:
    """A step that is left when its generator dies removes its own hooks."""

    def steps() -> Any:
        x = rand(16).requires_grad_()
        with session.step():
            loss = chain(x, 3)
            yield
            loss.backward()

    running = steps()
    next(running)
    assert top(False) is not None
    running.close()
    assert top(False) is None


def test_closing(session: Session, tmp_path: Any) -> None:
    early = session.step()
    with session.step(), pytest.raises(StateError, match="cannot be closed while"):
        session.close()
    session.close()
    session.close()
    for step in (early, session.step()):
        with pytest.raises(StateError, match="the session is closed"), step:
            pass
    assert top(False) is None
    y = torch.ones(4, requires_grad=True)
    (y * y).sum().backward()
    assert session.report().steps == 1


def test_closing_lets_go_of_file_and_threads(open_session, engine: str, tmp_path: Any) -> None:
    threads = len(os.listdir("/proc/self/task"))
    session = open_session(engine=engine)
    with session.step():
        chain(rand(64).requires_grad_(), 3).backward()
    assert len(scratch_files(tmp_path)) == 1
    session.close()
    assert scratch_files(tmp_path) == []
    wait_until(lambda: len(os.listdir("/proc/self/task")) <= threads)
    assert len(os.listdir("/proc/self/task")) <= threads


def test_exception_of_a_policy_is_the_users(open_session, any_engine: str) -> None:
    def policy(_: offload.SavedTensor) -> offload.Placement:
        raise LookupError("mine")

    session = open_session(engine=any_engine, policy=policy)
    with pytest.raises(LookupError, match="mine"), session.step():
        chain(rand(8).requires_grad_(), 2)
    assert top(False) is None


def test_policy_is_told_of_what_may_leave(open_session, any_engine: str) -> None:
    told = []

    def policy(saved: offload.SavedTensor) -> offload.Placement:
        told.append(saved)
        return offload.Placement.KEEP

    session = open_session(engine=any_engine, policy=policy, min_offload_bytes=16)
    with session.step() as step:
        x = rand(2, 8).requires_grad_()
        (x.t() * 2).sin().sum().backward()
        (torch.ones(1, requires_grad=True) * 2).sin().sum().backward()
    assert told == [offload.SavedTensor(64, torch.float32, (8, 2), torch.device("cpu"))]
    assert step.report.offloaded_blocks == 0


@pytest.mark.parametrize("copier", ["deepcopy", "pickle"])
def test_a_session_is_not_copied(session: Session, copier: str) -> None:
    import copy
    import pickle

    with pytest.raises(TypeError, match=r"a Session .* cannot be copied or pickled"):
        copy.deepcopy(session) if copier == "deepcopy" else pickle.dumps(session)
    assert pickle.loads(pickle.dumps(session.config)) == session.config


def test_a_model_saved_inside_a_step(session: Session, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("models") / "model.pt"
    model = net()
    with session.step():
        loss = model(rand(4, 16)).sum()
        torch.save(model.state_dict(), path)
        loss.backward()
    loaded = torch.load(path)
    assert all(torch.equal(loaded[k], v) for k, v in model.state_dict().items())


def test_saved_tensors_looked_at_from_outside(session: Session) -> None:
    """``grad_fn._saved_self`` asks outside a backward."""
    x = rand(64).requires_grad_()
    with session.step():
        y = (x * 2).sin()
    assert torch.equal(y.grad_fn._saved_self, x * 2)
    y.sum().backward()


# -- forked children ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestFork:
    def test_child_keeps_tensors(self, session: Session) -> None:
        """A step in a child works in memory; the parent's file is not touched."""
        x = rand(64).requires_grad_()
        chain(x, 3).backward()
        expected, x.grad = x.grad, None

        def child() -> None:
            with session.step() as step:
                chain(x, 3).backward()
            assert torch.equal(x.grad, expected)
            assert step.report.offloaded_blocks == 0
            assert step.report.kept_bytes["fork"] > 0

        with in_child() as run:
            run(child)
        with session.step() as step:
            chain(x, 3).backward()
        assert torch.equal(x.grad, expected)
        assert step.report.offloaded_blocks == 3

    def test_child_with_a_policy_that_keeps(self, open_session, engine: str) -> None:
        session = open_session(engine=engine, policy=lambda _: offload.Placement.KEEP)
        x = rand(64).requires_grad_()

        def child() -> None:
            with session.step():
                chain(x, 3).backward()

        with in_child() as run:
            run(child)

    @pytest.mark.parametrize("keep_last_bytes", [0, 1 << 20])
    def test_in_the_middle_of_a_step(self, open_session, engine: str, keep_last_bytes: int) -> None:
        """The child leaves the step and goes on; the parent's bytes stay what they were."""
        session = open_session(engine=engine, keep_last_bytes=keep_last_bytes)
        x = rand(4096).requires_grad_()
        step = session.step()
        with step:
            loss = chain(x * 2, 6)

            def child() -> None:
                y = rand(4096, seed=1).requires_grad_()
                chain(y * 2, 6).backward()
                step.__exit__(None, None, None)
                with session.step():
                    chain(y * 2, 6).backward()
                session.close()

            with in_child() as run:
                run(child)
            loss.backward()
        got, x.grad = x.grad, None
        chain(x * 2, 6).backward()
        assert torch.equal(got, x.grad)

    def test_backward_of_the_parents_graph_in_a_child(self, session: Session) -> None:
        """Bytes on the parent's disk are out of reach: a clear error, or the right gradient."""
        x = rand(4096).requires_grad_()
        chain(x, 3).backward()
        expected, x.grad = x.grad, None
        with session.step():
            loss = chain(x * 1, 3)

        def child() -> None:
            try:
                loss.backward()
            except StateError as e:
                assert "fork" in str(e)
            else:
                assert torch.equal(x.grad, expected)

        with in_child() as run:
            run(child)
        loss.backward()
        assert torch.equal(x.grad, expected)

    def test_a_child_opens_its_own(self, session: Session, tmp_path: Any, engine: str) -> None:
        def child() -> None:
            options = {"disk_dir": tmp_path, "min_offload_bytes": 0, "keep_last_bytes": 0}
            with offload.Session(engine=engine, **options) as own, own.step() as step:
                chain(rand(64).requires_grad_(), 3).backward()
            assert step.report.offloaded_blocks == 3

        with session.step(), in_child() as run:
            run(child)
