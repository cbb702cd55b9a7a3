"""Rules by module: what they move, and that nothing else can tell that they are there."""

import contextlib
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload import Session
from offload.recompute import Action
from tests.conftest import Opener
from tests.recompute.layers import ACTIONS, WIDTH, model, train
from tests.support import assert_identical, grads, in_threads, rand


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("pattern", ["blocks.*", "blocks.*.mlp", "**", ""])
def test_same_bits(session: Session, action: str, pattern: str) -> None:
    """Each action, on layers, parts of them and the whole, in steps and outside."""
    expected = train(model())
    for context in (session.step, contextlib.nullcontext):
        m = model()
        with session.apply(m, {pattern: action}):
            got = train(m, context)
        assert_identical(expected, got)


def test_actions_mixed_and_nested(session: Session) -> None:
    """Layers by different rules, and rules for parts of a layer that has one."""
    rules = {
        "blocks.0": "recompute+disk",
        "blocks.0.mlp": "recompute",  # a checkpoint within a checkpoint
        "blocks.0.attn": "disk",  # has no effect there
        "blocks.1": "keep",
        "blocks.1.mlp": "selective",
        "blocks.2": "selective",
        "blocks.2.mlp": "selective",
        nn.Linear: "host",
    }
    expected, m = train(model()), model()
    with session.apply(m, rules) as applied:
        assert_identical(expected, train(m, session.step))
    assert applied.actions["blocks.0.attn"] is Action.DISK
    assert applied.actions["blocks.3.mlp.up"] is Action.HOST
    assert applied.actions["blocks.1.mlp.up"] is Action.HOST


def test_autocast(session: Session) -> None:
    """Recomputation casts as the forward did."""

    def train_cast(m: nn.Module, context: Any) -> list[Tensor]:
        x = rand(4, 5, WIDTH, seed=2).requires_grad_()
        torch.manual_seed(1)
        with context():
            with torch.autocast("cpu", torch.bfloat16):
                loss = m(x).pow(2).sum()
            loss.backward()
        return [x.grad, *grads(m)]

    expected = train_cast(model(), contextlib.nullcontext)
    for action in ACTIONS:
        m = model()
        with session.apply(m, {"blocks.*": action}):
            assert_identical(expected, train_cast(m, session.step))


# -- placements -----------------------------------------------------------------------------------


def report(session: Session, rules: Any) -> offload.StepReport:
    """The figures of one step of a plain chain of three layers."""
    torch.manual_seed(0)
    chain = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
    x = rand(64, 16).requires_grad_() * 1
    with session.apply(chain, rules), session.step() as step:
        chain(x).sum().backward()
    return step.report


def test_placements(open_session: Opener) -> None:
    """Each layer saves its input and its result, which is the next one's input."""
    nbytes = 64 * 16 * 4
    everything = open_session()
    nothing = open_session(policy=lambda tensor: offload.Placement.KEEP)

    def placed(session: Session, action: str) -> tuple[int, int]:
        r = report(session, {"*": action})
        return r.offloaded_bytes // nbytes, r.kept_bytes.get("policy", 0) // nbytes

    for session in (everything, nothing):  # a rule counts, not the policy
        assert placed(session, "keep") == (0, 6)
        assert placed(session, "host") == (0, 6)  # the device's memory is host memory
        assert placed(session, "disk") == (4, 0)
        assert placed(session, "recompute") == (0, 3)
        assert placed(session, "recompute+host") == (0, 3)
        assert placed(session, "recompute+disk") == (3, 0)
    assert placed(everything, "selective") == (6, 0)
    assert placed(nothing, "selective") == (0, 6)
    inner = {"*": "disk", "1.*": "keep"}
    r = report(nothing, inner)
    assert (r.offloaded_bytes // nbytes, r.kept_bytes["policy"] // nbytes) == (
        4,
        2,
    )  # 2 saves twice
    selective_within = {"": "keep", "1": "selective"}
    r = report(everything, selective_within)
    assert (r.offloaded_bytes // nbytes, r.kept_bytes["policy"] // nbytes) == (2, 4)


def test_placement_ends_with_the_forward(open_session: Opener) -> None:
    """Also when it raises, and in other threads it never began."""
    session = open_session(policy=lambda tensor: offload.Placement.KEEP)

    class Bad(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] == 3:
                raise LookupError("in forward")
            others: list[int] = []

            def other() -> None:
                y = rand(64, 16).requires_grad_()
                with session.step() as step:
                    y.sin().sum().backward()
                others.append(step.report.offloaded_bytes)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert others == [0]
            return x.sin()

    bad = Bad()
    for action in ("disk", "recompute+disk", "selective"):
        with session.apply(bad, {Bad: action}):
            with pytest.raises(LookupError, match="in forward"), session.step() as step:
                bad(rand(3).requires_grad_())
            with session.step() as step:
                rand(8).requires_grad_().sin().sum().backward()
            assert step.report.offloaded_bytes == 0
    with session.apply(bad, {Bad: "disk"}):
        bad(rand(8).requires_grad_())


def test_another_sessions_steps_are_not_concerned(open_session: Opener) -> None:
    """A rule places what its own session's steps save."""
    mine, other = open_session(), open_session()
    m = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    with mine.apply(m, {"*": "keep"}), other.step() as step:
        m(rand(64, 16)).sum().backward()
    assert step.report.offloaded_bytes > 0
    assert "policy" not in step.report.kept_bytes


def test_recomputed_operations(session: Session) -> None:
    """As many as torch's checkpoint needs; none where there is no gradient to compute."""

    def flops(action: str | None, grad: bool = True) -> int:
        m, x = model(), rand(4, 5, WIDTH).requires_grad_()
        rules = session.apply(m, {} if action is None else {"blocks.*": action})
        with rules, torch.set_grad_enabled(grad), FlopCounterMode(display=False) as counter:
            out = m(x).sum()
            if grad:
                out.backward()
        return counter.get_total_flops()

    def torchs() -> int:
        m, x = model(), rand(4, 5, WIDTH).requires_grad_()
        with FlopCounterMode(display=False) as counter:
            for block in m.blocks:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            m.head(x).sum().backward()
        return counter.get_total_flops()

    plain = flops(None)
    assert flops("keep") == flops("disk") == plain < flops("recompute")
    assert flops("recompute") == flops("recompute+disk") == torchs()
    assert flops("selective") == plain
    assert flops("recompute", grad=False) == flops(None, grad=False)


def test_two_threads(session: Session) -> None:
    """One ruled model, two threads with steps of their own."""
    m = model()
    for block in m.blocks:  # the random state is the process's, and so are running statistics
        block.attn.drop.p = 0.0
        block.norm.eval()

    def gradient(seed: int, context: Any) -> Tensor:
        x = rand(4, 5, WIDTH, seed=seed).requires_grad_()
        with context():
            (grad,) = torch.autograd.grad(m(x).sum(), x)
        return grad

    expected = [gradient(seed, contextlib.nullcontext) for seed in range(2)]
    got: list[Any] = [None, None]

    def work(seed: int) -> None:
        for _ in range(5):
            got[seed] = gradient(seed, session.step)

    rules = {"blocks.0": "disk", "blocks.1": "keep", "blocks.2": "recompute", "*": "selective"}
    with session.apply(m, rules):
        in_threads(*(functools.partial(work, seed) for seed in range(2)))
    assert_identical(expected, got)


def test_forward_of_its_own_around_the_module(open_session) -> None:
    """As libraries put it there: whatever it is made of, statistics of the module move once."""
    states = []
    for ruled in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())
        holder = {"plain": module.forward}
        module.forward = lambda x, holder=holder: holder["plain"](x)
        rules = (
            open_session().apply(module, {"": "recompute"}) if ruled else contextlib.nullcontext()
        )
        with rules:
            module(rand(8, 4).requires_grad_()).sum().backward()
        states.append([*grads(module), *module.buffers()])
    assert_identical(*states)
