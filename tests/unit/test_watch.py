"""What a trace and a report say of modules, operators and tensors, and of where a step has come."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import offload
from offload.engines import Engine
from offload.report.trace import TRANSFERS, Event
from tests.conftest import Opener
from tests.doubles import LazyEngine
from tests.support import chain, rand


class Net(nn.Module):
    """Two blocks of a linear layer and a Tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


def names(events: list[Event], *wanted: str) -> list[str]:
    return [e.name for e in events if e.name in wanted]


def test_stalls_name_module_operator_and_tensor(open_session: Opener, real_engine: Engine) -> None:
    """Reads that only happen when somebody waits: every tensor stalls."""
    session = open_session(_engine=LazyEngine(real_engine, writes=False), prefetch_bytes=0)
    model = Net()
    with session.watch(model), session.step() as step:
        loss = model(rand(128, 32))
        session.drain()  # all of it is on the disk
        loss.backward()
    report = step.report
    found = {(w.module, w.operator, w.tensor): w.count for w in report.waits}
    shape = "float32[128, 32]"
    assert found == {
        ("blocks.0.0", "MmBackward0", shape): 1,  # the input
        ("blocks.0.1", "MmBackward0", shape): 1,  # a result, asked for first by the next layer
        ("blocks.1.1", "TanhBackward0", shape): 1,
    }
    assert sum(w.seconds for w in report.waits) == pytest.approx(report.stall_seconds)
    assert set(report.waits_by_module) == {"blocks.0.0", "blocks.0.1", "blocks.1.1"}


def test_without_watching_the_operator_is_still_known(
    open_session: Opener, real_engine: Engine
) -> None:
    session = open_session(_engine=LazyEngine(real_engine, writes=False), prefetch_bytes=0)
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 3)
        session.drain()
        loss.backward()
    (wait,) = step.report.waits
    assert (wait.module, wait.operator, wait.count) == ("", "SinBackward0", 3)


def test_backpressure_names_the_module(open_session: Opener, real_engine: Engine) -> None:
    session = open_session(
        _engine=LazyEngine(real_engine, reads=False), window_bytes=16384, prefetch_bytes=0
    )
    model = Net()
    with session.watch(model), session.step() as step:
        model(rand(128, 32)).backward()
    kinds = {w.kind for w in step.report.waits if w.seconds}
    assert "backpressure" in kinds
    assert all(w.module.startswith("blocks.") for w in step.report.waits)


def test_watching_leaves_the_model_as_it_was(open_session: Opener, any_engine: str) -> None:
    session = open_session(engine=any_engine)
    model = Net()
    before = {
        n: (list(m._forward_pre_hooks), list(m._forward_hooks)) for n, m in model.named_modules()
    }
    keys = list(model.state_dict())
    with session.watch(model) as watching:
        assert list(model.state_dict()) == keys
        with session.step():
            model(rand(128, 32)).backward()
    watching.remove()  # a second time
    after = {
        n: (list(m._forward_pre_hooks), list(m._forward_hooks)) for n, m in model.named_modules()
    }
    assert after == before
    session.drain()  # what is still on its way is of the watched step
    session.trace.clear()
    with session.step():
        model(rand(128, 32)).backward()
    assert all(e.about is None or e.about.module == "" for e in session.trace.events())
    assert names(session.trace.events(), "module") == []


def test_modules_nest_and_survive_an_exception(open_session: Opener, any_engine: str) -> None:
    session = open_session(engine=any_engine)
    model = Net()
    original: Callable[..., torch.Tensor] = model.blocks[1].forward
    with session.watch(model):

        def broken(x: torch.Tensor) -> torch.Tensor:
            raise RuntimeError("broken")

        model.blocks[1].forward = broken  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="broken"), session.step():
            model(rand(128, 32))
        model.blocks[1].forward = original  # type: ignore[method-assign]
        session.trace.clear()
        with session.step():
            model(rand(128, 32)).backward()
        assert session._hooks.scopes.module == ""
    modules = [e for e in session.trace.events() if e.name == "module"]
    assert [e.about.module for e in modules if e.about] == [
        "blocks.0.0", "blocks.0.1", "blocks.0", "blocks.1.0", "blocks.1.1", "blocks.1", "Net",
    ]  # fmt: skip
    inner, outer = modules[0], modules[2]
    assert outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


def test_moments_of_a_step(session: offload.Session) -> None:
    x = rand(64, 64).requires_grad_()
    with session.step():
        for _ in range(2):  # as with accumulated gradients
            chain(x * 1, 3).backward()
    moments = names(session.trace.events(), "begin", "forward", "backward", "end")
    assert moments == ["begin", "backward", "forward", "backward", "end"]


def test_events_and_report_tell_the_same(session: offload.Session) -> None:
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        chain(x * 1, 6).backward()
    session.drain()
    report = step.report
    events = session.trace.events()
    for lane in TRANSFERS:
        of_lane = [e for e in events if e.name == lane]
        assert sum(e.nbytes for e in of_lane) == report.lanes[lane].nbytes
        assert len(of_lane) == report.lanes[lane].operations
    stalled_ns = sum(e.end_ns - e.start_ns for e in events if e.name == "stall")
    assert stalled_ns / 1e9 == pytest.approx(report.stall_seconds)
    assert max(s.live_bytes for s in session.trace.samples()) == report.peak_live_bytes
    assert max(s.host_bytes for s in session.trace.samples()) == report.peak_arena_bytes


def test_profilers_see_our_ranges(open_session: Opener, real_engine: Engine) -> None:
    session = open_session(_engine=LazyEngine(real_engine, writes=False), prefetch_bytes=0)
    x = rand(64, 64).requires_grad_()
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler, session.step():
        loss = chain(x * 1, 3)
        session.drain()
        loss.backward()
    counts = {e.key: e.count for e in profiler.key_averages() if e.key.startswith("offload::")}
    assert counts == {
        "offload::step": 1, "offload::offload": 3, "offload::spill": 3, "offload::fetch": 3,
        "offload::stall": 3, "offload::reload": 3,
    }  # fmt: skip
