"""That rules apply can be told from nothing else, and which modules they apply to."""

import contextlib
import copy
import gc
import inspect
import io
import pickle
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import offload
from offload import Session
from offload.recompute import Action, every
from tests.conftest import Opener
from tests.recompute.layers import ACTIONS, MLP, WIDTH, Attention, Block, Model, model, train
from tests.support import assert_identical, rand


def looks(m: nn.Module) -> Any:
    """What anybody can see of a model."""
    return (
        list(m.state_dict()),
        [name for name, _ in m.named_modules()],
        [sorted(vars(part)) for part in m.modules()],
        [str(inspect.signature(part.forward)) for part in m.modules()],
        [inspect.getdoc(part.forward) for part in m.modules()],
        [type(part).__name__ for part in m.modules()],
        [type(part).__qualname__ for part in m.modules()],
        repr(m),
    )


@pytest.mark.parametrize("action", ACTIONS)
def test_nothing_else_changes(session: Session, action: str) -> None:
    """Names, state, attributes, signatures; and all is as it was afterwards."""
    m = model()
    before, classes = looks(m), [type(part) for part in m.modules()]
    with session.apply(m, {"blocks.*": action, nn.Linear: action}):
        assert looks(m) == before
        for part, known in zip(m.modules(), classes, strict=True):
            assert isinstance(part, known)
            assert type(part).forward is known.forward
        assert m.blocks[0].forward.__self__ is m.blocks[0]
        assert m.blocks[0].mlp(rand(2, WIDTH), scale=torch.ones(1)).shape == (2, WIDTH)
    assert looks(m) == before
    assert [type(part) for part in m.modules()] == classes


def test_undone_when_a_forward_raises(session: Session) -> None:
    """Leaving the context by an exception."""
    m = model()
    classes = [type(part) for part in m.modules()]
    with pytest.raises(RuntimeError), session.apply(m, {"**": "recompute"}), session.step():
        m(rand(4, 5, WIDTH + 1))
    assert [type(part) for part in m.modules()] == classes
    m.load_state_dict(model().state_dict())  # a statistic had moved before it raised
    assert_identical(train(model()), train(m, session.step))


def test_remove(session: Session) -> None:
    """Without a context; twice; and whoever holds a method that was ruled gets the plain one."""
    m = model()
    applied = session.apply(m, {"blocks.*": "recompute"})
    assert repr(applied).startswith("<Applied {'blocks.0': 'recompute', ")
    held = m.blocks[0].forward
    out = held(rand(4, 5, WIDTH).requires_grad_())
    applied.remove()
    applied.remove()
    out.sum().backward()  # recomputes
    calls = []
    m.blocks[0].mlp.register_forward_hook(lambda *_: calls.append(1))
    held(rand(4, 5, WIDTH).requires_grad_()).sum().backward()
    assert len(calls) == 1
    with session.apply(m, {"blocks.*": "disk"}):
        pass


def test_nothing_keeps_a_ruled_model_alive(session: Session) -> None:
    """Rules may be forgotten with the model."""
    m = model()
    died = weakref.ref(m.blocks[0])
    applied = session.apply(m, {"blocks.*": "recompute"})
    train(m, session.step, steps=1)
    del m, applied
    gc.collect()
    assert died() is None


def test_hooks_run_once(session: Session) -> None:
    """A ruled module's own hooks, also where its forward runs again."""
    m, calls = model(), []
    block = m.blocks[1]
    block.register_forward_pre_hook(lambda module, args: calls.append("before"))
    block.register_forward_hook(lambda module, args, out: calls.append("after"))
    block.register_full_backward_hook(lambda module, a, b: calls.append("backward"))
    block.mlp.up.weight.register_hook(lambda grad: calls.append("gradient"))
    for action in ACTIONS:
        calls.clear()
        with session.apply(m, {Block: action}):
            train(m, session.step, steps=1)
        assert calls == ["before", "after", "gradient", "backward"]


@pytest.mark.parametrize("action", ACTIONS)
def test_copies_are_free_of_rules(session: Session, action: str) -> None:
    """deepcopy, copy, pickle and torch.save of a ruled model."""
    m = model()
    with session.apply(m, {"**": action}):
        assert b"offload" not in pickle.dumps(m)
        copies = [copy.deepcopy(m), pickle.loads(pickle.dumps(m)), copy.copy(m)]
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        copies.append(torch.load(file, weights_only=False))
        for c in copies:
            assert type(c) is Model
        for c in copies[:2] + copies[3:]:
            assert [type(part) for part in c.modules()] == [type(p) for p in model().modules()]
            assert looks(c) == looks(model())
        file.seek(0)
        file.truncate()
        torch.save(m.state_dict(), file)
        expected = train(model())
        m.load_state_dict(model().state_dict())
        assert_identical(expected, train(m, session.step))
    assert_identical(expected, train(copies[1], session.step))


def test_pickling_of_ones_own(session: Session) -> None:
    """A module that says itself how it is copied, and one of a class that counts subclasses."""

    class Counted(nn.Module):
        made: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, tag: str) -> None:
            Counted.made.append(tag)

        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

        def __reduce__(self) -> Any:
            return type(self), ()

    m = Counted()
    with session.apply(m, {Counted: "recompute"}):
        assert type(copy.deepcopy(m)) is Counted
        assert Counted.made == []


def test_forward_of_ones_own(session: Session) -> None:
    """A ``forward`` on the instance, as some libraries put it there: ruled, and left there."""
    m = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    plain, calls = m.forward, []

    def counted(x: Tensor) -> Tensor:
        calls.append(1)
        return plain(x)

    m.forward = counted
    with session.apply(m, {"": "recompute"}):
        m(rand(4, 16).requires_grad_()).sum().backward()
        assert len(calls) == 2
        assert vars(m)["forward"] is counted
        del m.forward
        with pytest.raises(AttributeError):
            del m.forward
        m.forward = counted
        m(rand(4, 16).requires_grad_()).sum().backward()
        assert len(calls) == 4
    assert m.forward is counted
    assert vars(m)["forward"] is counted


def test_class_put_above_ours(session: Session) -> None:
    """``parametrize`` makes a class of its own: ours goes out of force beneath it."""
    m = nn.Linear(16, 16)
    applied = session.apply(m, {"": "recompute"})
    nn.utils.parametrizations.weight_norm(m)
    above = type(m)
    applied.remove()
    assert type(m) is above
    x = rand(4, 16).requires_grad_()
    m(x).sum().backward()
    nn.utils.parametrize.remove_parametrizations(m, "weight")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("action", ACTIONS)
def test_compiled(open_session: Opener, action: str) -> None:
    """A block compiled before or after the rule, by either way."""
    session = open_session()
    x = rand(4, 5, WIDTH, seed=2).requires_grad_()

    def gradient(m: nn.Module, context: Any = contextlib.nullcontext) -> Tensor:
        with context():
            (grad,) = torch.autograd.grad(m(x).sum(), x)
        return grad

    def fresh() -> Model:
        m = model()
        for block in m.blocks:
            block.attn.drop.p = 0.0
        return m

    expected = gradient(fresh())
    wrapped, in_place, after = fresh(), fresh(), fresh()
    wrapped.blocks[0] = torch.compile(wrapped.blocks[0], backend="aot_eager")
    in_place.blocks[0].compile(backend="aot_eager")
    for m in (wrapped, in_place, after):
        with session.apply(m, {"blocks.*": action}):
            if m is after:
                m = torch.compile(m, backend="aot_eager")
            for _ in range(2):
                torch.testing.assert_close(gradient(m, session.step), expected)
    torch._dynamo.reset()


def chosen(session: Session, rules: Any, m: nn.Module | None = None) -> list[str]:
    """The names of the modules that rules choose."""
    with session.apply(m if m is not None else model(), rules) as applied:
        return list(applied.actions)


def test_selectors(open_session: Opener) -> None:
    """Globs, classes, functions; every so many; pairs in place of a mapping."""
    session = open_session()
    assert chosen(session, {"blocks.*": "keep"}) == [f"blocks.{i}" for i in range(4)]
    assert chosen(session, {"blocks.[12].mlp": "keep"}) == ["blocks.1.mlp", "blocks.2.mlp"]
    assert chosen(session, {"**.up": "keep"}) == [f"blocks.{i}.mlp.up" for i in range(4)]
    assert chosen(session, {"": "keep"}) == [""]
    assert chosen(session, {"**": "keep"}) == [""]  # all within goes by the same rule
    assert chosen(session, {Attention: "keep"}) == [f"blocks.{i}.attn" for i in range(4)]
    assert chosen(session, {lambda name, m: name.endswith("1.mlp"): "keep"}) == ["blocks.1.mlp"]
    assert chosen(session, {every(2, "blocks.*"): "keep"}) == ["blocks.0", "blocks.2"]
    assert chosen(session, {every(2, Block, start=1): "keep"}) == ["blocks.1", "blocks.3"]
    assert chosen(session, {every(2, every(2, Block)): "keep"}) == ["blocks.0"]
    assert chosen(session, [(Block, "keep"), (MLP, Action.DISK)])[:2] == [
        "blocks.0", "blocks.0.mlp",
    ]  # fmt: skip
    assert chosen(session, {}) == []


def test_the_first_rule_wins(open_session: Opener) -> None:
    """In the order given."""
    m = model()
    with open_session().apply(
        m, {"blocks.0": "keep", "blocks.*": "disk", Block: "host"}
    ) as applied:
        assert [a.value for a in applied.actions.values()] == ["keep", "disk", "disk", "disk"]


def test_module_with_two_names(open_session: Opener) -> None:
    """It is ruled once."""
    shared = MLP()
    m = nn.ModuleDict({"a": shared, "b": shared})
    session = open_session()
    assert chosen(session, {MLP: "recompute"}, m) == ["a"]
    assert chosen(session, {"b": "recompute"}, m) == ["b"]


def test_errors(open_session: Opener) -> None:
    """Each names what is wrong and what to do; none leaves anything behind."""
    session, m = open_session(), model()
    classes = [type(part) for part in m.modules()]
    with pytest.raises(
        ValueError, match=r"'blocks\.\*\.mpl' matches no module.*among.*'blocks\.0\.mlp"
    ):
        session.apply(m, {"blocks.*": "keep", "blocks.*.mpl": "keep"})
    with pytest.raises(ValueError, match="'blocks' matches no module that has a forward"):
        session.apply(m, {"blocks": "keep"})
    with pytest.raises(ValueError, match=r"Conv2d.*matches no module"):
        session.apply(m, {nn.Conv2d: "keep"})
    with pytest.raises(
        ValueError, match=r"'disc' is no action; choose one of 'keep', 'host', 'disk'"
    ):
        session.apply(m, {"blocks.*": "disc"})
    with pytest.raises(TypeError, match="3 chooses no modules"):
        session.apply(m, {3: "keep"})
    with pytest.raises(TypeError, match="model is function; give"):
        session.apply(model, {"*": "keep"})
    with pytest.raises(ValueError, match="every"):
        every(0, "blocks.*")
    with session.apply(m, {"blocks.1": "keep"}):
        with pytest.raises(offload.errors.StateError, match=r"'blocks\.1' is ruled already"):
            session.apply(m, {"blocks.*": "disk"})
        with session.apply(m, {"blocks.0": "disk"}):  # another module may be
            pass
    assert [type(part) for part in m.modules()] == classes


@pytest.mark.filterwarnings("ignore")
def test_script_module(open_session: Opener) -> None:
    """Has no forward that Python could replace."""
    m = nn.Sequential(nn.Linear(4, 4), torch.jit.trace(nn.Tanh(), rand(4)))
    with pytest.raises(TypeError, match="'1' is a ScriptModule"):
        open_session().apply(m, {"*": "keep"})
    assert type(m[0]) is nn.Linear
