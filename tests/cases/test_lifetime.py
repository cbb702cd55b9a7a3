"""Graphs dropped, kept, used late or never: nothing leaks, nothing is given back too early."""

import gc
import threading
import weakref

import pytest
import torch

from offload import Session
from tests.conftest import assert_empty, held, wait_until
from tests.support import Probe, assert_same, chain, drain, grads, net, rand, train_net


class Tag:
    pass


def test_forward_without_backward(session: Session) -> None:
    """Forwards without a backward do not disturb others; an old one can still be used."""

    def step(context):
        model = net()
        x = rand(4, 16, seed=1)
        kept = []
        for i in range(3):
            with context():
                kept.append(model(x * (i + 1)).sum())
                model(x + i).pow(2).sum().backward()
        kept[1].backward()
        del kept
        with context():
            model(x).sum().backward()
        return grads(model)

    assert_same(step, session)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_exception_inside_the_step(
    session: Session, error: type[BaseException], where: str
) -> None:
    """The user's own exception comes out, our hooks are off, and the next step works."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            return h.clone()

        @staticmethod
        def backward(ctx, g):
            raise error("user")

    x = torch.ones(64, requires_grad=True)
    with pytest.raises(error, match="user"), session.step():
        h = (x * 2).sin()
        if where == "forward":
            raise error("user")
        Raises.apply(h.exp()).exp().sum().backward()
    log = {}
    kept = torch.ones(64, requires_grad=True) * 1
    Probe.apply(kept, log).sum().backward()
    assert log["saved"][0] == log["back"][0], "the hooks are still on"

    assert_same(train_net, session)


def test_backward_after_the_block(session: Session) -> None:
    """A step may hold the forward only."""

    def step(context):
        model = net()
        x = torch.ones(3, 16)
        with context():
            first = model(x).sum()
        with context():
            second = model(x * 2).sum()
        first.backward()
        second.backward()
        return grads(model)

    assert_same(step, session)


def test_backward_after_the_session(open_session, engine: str) -> None:
    """A closed session still serves the graphs that were waiting, then lets go of everything."""
    x = rand(64, 64).requires_grad_()
    with open_session(engine=engine) as session, session.step():
        loss = chain(x, 4)
    loss.backward()
    got, x.grad = x.grad, None
    chain(x, 4).backward()
    assert torch.equal(got, x.grad)


@pytest.mark.parametrize("end", ["backward", "drop", "collect", "close"])
def test_session_that_closed_first_ends_with_its_last_graph(
    open_session, engine: str, end: str
) -> None:
    """Threads, file and memory go then, though somebody may still hold the session."""
    before = held()
    x = rand(64, 64).requires_grad_()
    with open_session(engine=engine) as session, session.step():
        first, last = chain(x, 4), chain(x * 2, 4)
    first.backward()
    last.backward(retain_graph=True)
    assert held() > before, "the last graph has nowhere to read from"
    if end == "backward":
        last.backward()
    if end == "collect":
        cycle: list[object] = [last]
        cycle.append(cycle)
        del cycle
    if end == "close":
        session.close()
        assert held() > before
    del last
    gc.collect()
    wait_until(lambda: held() <= before)
    assert held() <= before, "descriptors or threads were left"
    assert session.held_bytes == 0
    session.close()


def test_retained_graph(session: Session) -> None:
    """A second backward reads again, also after other work has used the same space."""

    def step(context):
        model = net()
        x = torch.ones(3, 16)
        with context():
            loss = model(x).sum()
            loss.backward(retain_graph=True)
            model(x * 7).sum().backward()
            loss.backward(retain_graph=True)
            model(x * 9)
            loss.backward()
        return grads(model)

    assert_same(step, session)


def test_retained_graph_does_not_fill_memory_again(session: Session) -> None:
    """What was read back for one backward is not held for the next."""
    x = rand(64, 64).requires_grad_()
    with session.step():
        loss = chain(x, 6)
    drain(session)
    loss.backward(retain_graph=True)
    drain(session)
    wait_until(lambda: session._tiers.host.used_bytes == 0)
    assert session._tiers.host.used_bytes == 0
    assert session._hooks.live_blocks > 0


def test_dropped_graph_does_not_fill_the_memory_of_another(session: Session) -> None:
    """What both have saved was read back for one, and the other will never ask for it."""
    x = rand(64, 64).requires_grad_()
    with session.step():
        h = x.sin()
        kept, dropped = (h * h).sum(), h.cos().sum()
        del h
    drain(session)
    kept.backward(retain_graph=True)
    del dropped
    with session.step():
        pass
    drain(session)
    wait_until(lambda: session.held_bytes == 0)
    assert session.held_bytes == 0
    assert session._hooks.live_blocks > 0


def test_graph_dropped_without_backward(session: Session) -> None:
    """Neither memory nor disk space stays, and autograd's nodes are freed."""
    for _ in range(3):
        x = torch.rand(1 << 12, requires_grad=True)
        with session.step():
            y = (x * 2).exp()
            loss = y.sin().sum()
        tag = Tag()
        alive = weakref.ref(tag)
        y.grad_fn.metadata["tag"] = tag
        del x, y, loss, tag
        gc.collect()
        assert alive() is None
        drain(session)
        assert session._hooks.live_blocks == 0
        assert_empty(session)


def test_operation_that_saves_its_output(open_session, engine: str) -> None:
    """An output must not be tied to its own node: that cycle would never be freed."""
    for min_offload_bytes in (0, 1 << 20):
        session = open_session(engine=engine, min_offload_bytes=min_offload_bytes)
        with session.step():
            y = torch.rand(64, requires_grad=True).exp()
        tag = Tag()
        alive = weakref.ref(tag)
        y.grad_fn.metadata["tag"] = tag
        del y, tag
        assert alive() is None


def test_blocks_go_as_backward_goes(session: Session) -> None:
    """Each block is given back as soon as its node has run, not at the end."""
    left = []
    x = rand(256).requires_grad_()
    with session.step():
        h = x
        for _ in range(5):
            h = h.sin()
            h.register_hook(lambda _: left.append(session._hooks.live_blocks))
        loss = h.sum()
        del h
        loss.backward()
    assert left == sorted(left, reverse=True)
    assert left[0] - left[-1] >= 3


def test_original_that_is_still_alive_is_used(session: Session) -> None:
    """Nothing is read while somebody keeps the tensor in memory anyway."""
    x = rand(1024).requires_grad_()
    with session.step() as step:
        h = x * 1
        log = {}
        loss = Probe.apply(h, log).sum()
    drain(session)
    loss.backward()
    assert log["saved"][0] == log["back"][0]
    assert step.report.read_bytes == 0


def test_saved_tensor_outlives_its_graph(session: Session) -> None:
    """Memory handed to a backward stays valid for as long as anybody holds it."""
    held = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h * 1

        @staticmethod
        def backward(ctx, g):
            held.append(ctx.saved_tensors[0])
            return g

    x = rand(1024).requires_grad_()
    for i in range(4):
        with session.step():
            Keeps.apply(x * (i + 1)).sum().backward()
    for i, tensor in enumerate(held):
        assert torch.equal(tensor, x.detach() * (i + 1))


def test_more_is_held_than_the_arena_has(open_session, engine: str) -> None:
    """A backward that keeps all it was given goes on, beyond the arena."""
    session = open_session(engine=engine, window_bytes=8192, prefetch_bytes=8192)
    held = []

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, h):
            ctx.save_for_backward(h)
            return h * 2

        @staticmethod
        def backward(ctx, g):
            held.append(ctx.saved_tensors[0])
            return g

    h = torch.ones(1024, requires_grad=True)
    with session.step():
        loss = h * 1
        for _ in range(12):
            loss = Keeps.apply(loss)
        loss = loss.sum()
        drain(session)
        loss.backward()
    assert [t[0].item() for t in held] == [2.0**i for i in range(11, -1, -1)]
    held.clear()  # the class, this list and the graph hold each other through C++


def test_garbage_collection_inside_pack(open_session, engine: str) -> None:
    """Finalisers may run anywhere, also while the session's lock is held."""
    import offload

    class Cycle:
        pass

    def policy(_: offload.SavedTensor) -> offload.Placement:
        gc.collect()
        return offload.Placement.DISK

    session = open_session(engine=engine, policy=policy)
    for i in range(3):
        cycle = Cycle()
        cycle.self = cycle
        with session.step():
            cycle.graph = chain(rand(256, seed=i).requires_grad_(), 3)
        del cycle
    with session.step():
        chain(rand(256).requires_grad_(), 3).backward()
    gc.collect()
    assert session._hooks.live_blocks == 0


def test_session_without_close(open_session, engine: str, tmp_path) -> None:
    """A session that is merely dropped lets go as well: reference counting suffices."""
    import offload

    session = offload.Session(
        disk_dir=tmp_path, min_offload_bytes=0, keep_last_bytes=0, engine=engine
    )
    with session.step():
        chain(rand(256).requires_grad_(), 3).backward()
    alive = weakref.ref(session._tiers)
    gc.disable()
    try:
        del session
        wait_until(lambda: alive() is None)  # autograd's threads let go a moment later
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("pool", [False, True])
def test_session_collected_on_a_thread_of_its_engine(open_session, tmp_path, pool: bool) -> None:
    """The garbage collector runs on any thread, and waits there for no other."""
    import offload

    before = held()
    session = offload.Session(
        disk_dir=tmp_path, min_offload_bytes=0, keep_last_bytes=0, engine="aio"
    )
    loop = session._tiers.common.engine._inbox.loop  # type: ignore[attr-defined]
    with session.step():
        loss = chain(rand(256).requires_grad_(), 3)
    session.drain()
    collected = threading.Event()

    def collect() -> None:
        gc.collect()
        gc.collect()  # what the finalisers of the first still held
        collected.set()

    gc.disable()
    try:
        cycle: list[object] = [session, loss]
        cycle.append(cycle)
        del cycle, session, loss
        if pool:
            loop.call_soon_threadsafe(loop.run_in_executor, None, collect)
        else:
            loop.call_soon_threadsafe(collect)
        assert collected.wait(5)
        wait_until(lambda: held() <= before)
        assert held() <= before, "descriptors or threads were left"
    finally:
        gc.enable()
