"""Rules by module: what they move, and that nothing else can tell that they are there."""

import contextlib
import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import offload
from offload import Session
from offload.recompute import Action, every
from tests.conftest import Opener
from tests.support import assert_identical, grads, rand

WIDTH = 16
TOKENS_BYTES = 4 * 5 * WIDTH * 4
ACTIONS = [action.value for action in Action]


class MLP(nn.Module):
    """Four times as wide inside."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, *, debug: bool = False, scale: Tensor | None = None) -> Tensor:
        """Project."""
        h = self.down(F.gelu(self.up(x)))
        return h if scale is None else h * scale


class Attention(nn.Module):
    """One head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unsqueeze(1) for t in self.qkv(x).chunk(3, -1))
        h: Tensor = self.drop(F.scaled_dot_product_attention(q, k, v).squeeze(1))
        return h


class Block(nn.Module):
    """A transformer layer, whose normalisation has statistics that run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.attn = Attention()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        h: Tensor = x + self.mlp(x, debug=True, scale=x.sigmoid())
        return h


class Model(nn.Module):
    """Four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        h: Tensor = self.head(x)
        return h


def model() -> Model:
    """Always the same."""
    torch.manual_seed(0)
    return Model()


def train(model: nn.Module, context: Any = contextlib.nullcontext, steps: int = 2) -> list[Tensor]:
    """Losses, gradients, state and random state after some steps."""
    torch.manual_seed(1)
    x = rand(4, 5, WIDTH, seed=2).requires_grad_()
    losses = []
    for _ in range(steps):
        with context():
            loss = model(x).pow(2).sum()
            loss.backward()
        losses.append(loss.detach())
    return [*losses, x.grad, *grads(model), *model.buffers(), torch.get_rng_state()]


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
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert_identical(expected, got)


# -- nothing else changes -------------------------------------------------------------------------


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


# -- which modules --------------------------------------------------------------------------------


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
    with pytest.raises(TypeError, match="not to function"):
        session.apply(model, {"*": "keep"})
    with pytest.raises(ValueError, match="every"):
        every(0, "blocks.*")
    with session.apply(m, {"blocks.1": "keep"}):
        with pytest.raises(offload.StateError, match=r"'blocks\.1' is ruled already"):
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
