"""Control: runs the segments of a model by an assignment, and writes down what they did.

A controller rules the model's segments for a session. When a forward begins it is told what to do
with each segment (an ``Assignment``), and when that forward's backward has ended it tells what
happened (a ``Pass``).
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offload.blocks.placement import Placement
from offload.hooks.pack import Hooks
from offload.planner.observer import Observer, missing_gradients
from offload.planner.overruns import Overruns
from offload.planner.record import (
    Assignment,
    Clock,
    DeviceClock,
    Gap,
    HostClock,
    Pass,
    Visit,
    signature_of,
)
from offload.planner.rooms import Rooms
from offload.recompute.caches import run_twice
from offload.recompute.checkpoint import ContextFn
from offload.recompute.rules import WAYS, Action, Applied, Rule, check_unruled, once, recomputed
from offload.recompute.selective import selective
from offload.report import Counters
from offload.tensors.live import storage_of
from offload.tiers import Tiers
from offload.tiers.gate import STRIDE, UNPLANNED

__all__ = ["Controller", "Scheme"]

_graph_task_id = torch._C._current_graph_task_id
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
_LEFT_OUT = 2  # backwards in a row that do not come to a segment: then none is expected to


class Scheme(Protocol):
    """Who decides."""

    def assign(self, signature: str) -> Assignment:
        """For a forward of inputs of this signature, which is about to run."""

    def finished(self, done: Pass, counters: Counters) -> None:
        """A forward and its backward are over."""


class _PlannedRule(Rule):
    """Asks the controller, call by call."""

    def __init__(self, name: str, module: nn.Module, controller: Controller) -> None:
        super().__init__(module, Action.KEEP, controller.hooks.placed, controller.tell)
        self.module = weakref.ref(module)
        self.name = name
        self._controller = controller

    @cached_property
    def context_fn(self) -> ContextFn:
        """Of this segment's selective regions."""
        return selective()

    def run(
        self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        controller = self._controller
        if not (self.in_force and controller.is_ours()):
            return forward(*args, **kwargs)
        if not self.name:
            controller.open_pass([*args, *kwargs.values()])
            return forward(*args, **kwargs)
        return controller.visit(self, forward, args, kwargs)


class Controller:
    """See the module's text.

    Args:
        model: what is planned for.
        names: of its segments.
        hooks, tiers: of the session.
        in_step: whether the calling thread is inside a step of the session.
        scheme: decides.
    """

    def __init__(
        self,
        model: nn.Module,
        names: Sequence[str],
        hooks: Hooks,
        tiers: Tiers,
        in_step: Callable[[], bool],
        scheme: Scheme,
    ) -> None:
        self.hooks = hooks
        self._model = weakref.ref(model)
        self._tiers = tiers
        self._in_step = in_step
        self._scheme = scheme
        self._observer = Observer(hooks, tiers)
        self._is_cpu = self._observer.is_cpu
        self._overruns = Overruns(tiers, self._observer) if self._is_cpu else None
        device = tiers.common.config.device
        self._clock: Clock = HostClock() if self._is_cpu else DeviceClock(device)
        self._thread = 0
        self._pass: Pass | None = None  # whose forward is the newest, or whose backward runs
        self._waiting: list[weakref.ref[Pass]] = []  # held by their graphs: dropped with those
        self._recorded: Pass | None = None  # the pass before, if it was recorded
        self._opened = 0  # in this step
        self._unseen: Counter[str] = Counter()  # backwards in a row that left out a segment
        self._counters = Counters()
        self._started: Any = None
        modules = dict(model.named_modules(remove_duplicate=False))
        chosen = {name: (modules[name], Action.KEEP) for name in ["", *names]}
        check_unruled(chosen)
        self.tell = once()
        self._policy = hooks.policy
        self.applied = Applied(chosen, lambda name, module, _: _PlannedRule(name, module, self))
        hooks.policy = lambda _: Placement.KEEP  # what is outside of segments
        hooks.watch = self._saw
        self._rooms = Rooms(tiers, self._overruns)

    def remove(self) -> None:
        """Make model and session what they were."""
        self.applied.remove()
        self.hooks.policy, self.hooks.watch = self._policy, None
        self.hooks.held = frozenset()
        self._rooms.close()

    # -- steps and passes -------------------------------------------------------------------------

    def begin_step(self, counters: Counters) -> None:
        """A step begins on this thread."""
        self._close_pass(None)
        self._waiting, self._opened = [], 0
        self._thread = threading.get_ident()
        self._counters = counters
        self._started = self._clock.stamp()

    def end_step(self) -> None:
        """It ends, perhaps before its backward has run."""
        if threading.get_ident() == self._thread:
            self._close_pass(self._clock.stamp())

    def is_ours(self) -> bool:
        """Whether a forward that runs now is to be planned."""
        ours = self._in_step() and threading.get_ident() == self._thread
        return ours and torch.is_grad_enabled() and _graph_task_id() == -1

    def open_pass(self, inputs: list[object]) -> Pass:
        """A forward of the model begins."""
        signature = signature_of(inputs)
        stamp = self._clock.stamp()
        started = stamp if self._opened else self._started
        self._put_aside(stamp)
        assigned = self._scheme.assign(signature)
        first = self._opened * STRIDE
        current = Pass(signature, self._clock, started, first, assigned)
        self._pass, self._opened = current, self._opened + 1
        # The batch: whoever passes it holds it meanwhile, so that sending it away frees nothing.
        tensors = [t for t in pytree.tree_leaves(inputs) if isinstance(t, Tensor)]
        self._pass.input_bytes = sum(t.numel() * t.element_size() for t in tensors)
        storages = [storage_of(t) for t in tensors if t.grad_fn is None]
        self.hooks.held = frozenset(s._cdata for s in storages if s is not None)
        if self._overruns is not None:
            self._overruns.receive(current, filter(None, storages), self._waiting)
            current.crowded = self._overruns.is_crowded(assigned.spare_bytes)
        if assigned.record:
            current.leftover = self._leftover()
        if assigned.record and not self._is_cpu and not self._in_flight():
            current.start_bytes = torch.accelerator.memory_allocated()
            current.gradient_bytes = missing_gradients(self._model())
        if assigned.watch_peak and not self._is_cpu:
            torch.accelerator.reset_peak_memory_stats()
        self._rooms.begin(current, self._waiting)
        self._step_outside(current)
        return current

    def _step_outside(self, current: Pass) -> None:
        """What this thread saves until the next segment begins lies in a gap."""
        number, assigned = len(current.visits), current.assignment
        way = WAYS[Action.of(assigned.gap_actions.get(number, assigned.gap_default))]
        if way.placement is Placement.KEEP:
            self.hooks.place(None)
        else:
            self.hooks.place(way.placement, current.first + 2 * number)

    def _in_flight(self) -> int:
        """Other forwards whose backward is still to come."""
        self._waiting = [r for r in self._waiting if r() is not None]
        return len(self._waiting)

    def _leftover(self) -> dict[int, int]:
        """What is in other hands of the pass before, and of those that wait."""
        others = filter(None, [self._recorded, *(r() for r in self._waiting)])
        return {k: n for other in others for k, n in self._observer.lingering(other).items()}

    def _put_aside(self, stamp: Any) -> None:
        """Another forward, or its backward, takes the place of the present one."""
        current = self._pass
        if current is not None and current.visits and not current.in_backward:
            self._waiting.append(weakref.ref(current))
            current.pauses.append((stamp, stamp))
            self._pass = None
        else:
            self._close_pass(stamp)

    def _resume(self, current: Pass, stamp: Any) -> bool:
        """The backward of a forward that was waiting; False if that is not known any more."""
        if not any(r() is current for r in self._waiting):
            return False
        self._put_aside(stamp)
        self._waiting = [r for r in self._waiting if r() is not current]
        self._pass = current
        current.pauses[-1] = (current.pauses[-1][0], stamp)
        self._rooms.begin(current, self._waiting)
        return True

    def _close_pass(self, ended: Any) -> None:
        done, self._pass = self._pass, None
        self.hooks.place(None)
        self.hooks.held = frozenset()  # addresses that mean nothing any more
        if done is None:
            return
        if done.in_backward:
            done.ended = ended
            self._unseen.update(v.key for v in done.visits if v.began is None)
            if done.assignment.record:
                self._observer.end_backward(done.visits[0])
        if self._overruns is not None:
            self._overruns.judge(done, self._counters)
        if done.assignment.watch_peak and not self._is_cpu:
            done.peak_bytes = torch.accelerator.max_memory_allocated()
        self._recorded = done if done.assignment.record else None
        done.waits = self._counters.only_waits
        self._scheme.finished(done, self._counters)

    # -- segments ---------------------------------------------------------------------------------

    def visit(
        self,
        rule: _PlannedRule,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a segment's forward by the assignment."""
        current = self._pass
        if current is None or current.in_backward:
            current = self.open_pass([*args, *kwargs.values()])
        if current.open is not None:  # a segment within a segment
            return forward(*args, **kwargs)
        visit = self._enter(current, rule.name)
        name = visit.action.partition(":")[0]
        way = WAYS[Action.of(name)]
        limit = current.assignment.limits.get(visit.key)
        entry = 2 * visit.number + 1 if visit.number >= 0 else UNPLANNED
        try:
            with self.hooks.placed(way.placement, current.first + entry, limit):
                module = rule.module()
                assert module is not None
                # Also where it runs once: what it keeps was measured where it ran twice.
                forward, args, kwargs = run_twice(module, forward, args, kwargs, rule.tell)
                if way.recomputed:
                    region = self._region(visit, module, forward)
                    context_fn = rule.context_fn if way.selective else None
                    result = recomputed(region, args, kwargs, context_fn)
                else:
                    result = forward(*args, **kwargs)
        finally:
            self._leave(current, visit)
        self._mark_backward(current, visit, rule, result)
        self._step_outside(current)
        return result

    def _enter(self, current: Pass, name: str) -> Visit:
        current.calls[name] += 1
        key = f"{name}#{current.calls[name]}" if current.calls[name] > 1 else name
        assigned = current.assignment
        visit = Visit(key, len(current.visits), assigned.actions.get(key, assigned.default))
        visit.before = current.after
        self._rooms.make(current, 2 * visit.number + 1)
        current.open = visit
        if assigned.record:
            visit.lingering = self._observer.lingering(current)
            self._observer.note_collected(current.visits[:-1])  # the last may be its input
            self._observer.begin_peak(visit)
        if key in (assigned.actions or (key,)) and self._unseen[key] < _LEFT_OUT:
            current.visits.append(visit)
            current.after = Gap()
        else:
            visit.number = -1
        visit.entered = self._clock.stamp()
        return visit

    def _leave(self, current: Pass, visit: Visit) -> None:
        visit.left = self._clock.stamp()
        current.open = None
        if current.assignment.record:
            self._observer.end_forward(visit)
        self._rooms.make(current, 2 * len(current.visits))

    def _mark_backward(self, current: Pass, visit: Visit, rule: _PlannedRule, result: Any) -> None:
        outputs = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        marked = [t for t in outputs if t.requires_grad and t.grad_fn is not None]
        for output in marked:
            output.register_hook(lambda _: self._backward(current, visit, rule))  # type: ignore[no-untyped-call]
        if not marked and visit.number >= 0:
            current.visits.remove(visit)
            visit.number = -1
            current.after = visit.before  # that gap goes on

    def _backward(self, current: Pass, visit: Visit, rule: _PlannedRule) -> None:
        """The gradient of the segment's result is there."""
        if not rule.in_force:
            return  # the plan was taken back, and the session may be closed
        stamp = self._clock.stamp()
        self._unseen.pop(visit.key, None)
        if visit.number < 0:  # it takes part after all
            current.misjudged = True
            return
        if visit.backward == _graph_task_id():
            return  # of another result
        if visit.began is not None or not (current is self._pass or self._resume(current, stamp)):
            self._rooms.make_back(current, visit, planned=False)
            return
        visit.backward = _graph_task_id()
        # Where what follows was not let go of, the plan does not know what is there.
        later = current.visits[visit.number + 1 :]
        is_planned = all(v.began is not None for v in later) and not _keeps_graph()
        if not current.in_backward:
            current.in_backward, current.in_flight = True, 1 + self._in_flight()
            if current.assignment.record:
                current.leftover_back = self._leftover()
        visit.began = stamp
        if current.assignment.record and visit.number + 1 < len(current.visits):
            self._observer.end_backward(current.visits[visit.number + 1])
        self._rooms.make_back(current, visit, planned=is_planned)
        self.hooks.foresee()
        if current.assignment.record:
            visit.lingering_back = self._observer.lingering(current)
            # What came early is not of this segment.
            self._observer.begin_peak(visit)
            visit.gradient_bytes = missing_gradients(rule.module())

    # -- regions ----------------------------------------------------------------------------------

    def _region(
        self, visit: Visit, module: nn.Module, forward: Callable[..., Any]
    ) -> Callable[..., Any]:
        def region(*args: Any, **kwargs: Any) -> Any:
            _ = module  # so that what finds modules in functions finds it here
            with self._inside(visit):
                return forward(*args, **kwargs)

        return region

    @contextlib.contextmanager
    def _inside(self, visit: Visit) -> Iterator[None]:
        """The forward of a region, or one of its recomputations."""
        again = _graph_task_id() != -1
        start = self._clock.stamp() if again else None
        current = self._pass
        assigned = current.assignment if current is not None else Assignment()
        watched = self._is_cpu if again else assigned.record
        selects = assigned.select and not again
        try:
            with (
                self._observer.inside(visit, again) if watched else contextlib.nullcontext(),
                self._observer.selected(visit) if selects else contextlib.nullcontext(),
            ):
                yield
        finally:
            if again:
                visit.recomputed.append((start, self._clock.stamp()))

    def _saw(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """The session is about to take, or leave, what is saved."""
        if self._is_cpu and storage.nbytes() < self._tiers.common.config.min_offload_bytes:
            self._tiers.live.track(storage)
        if self._overruns is not None:
            self._overruns.saw(tensor, storage)
        current = self._pass
        if current is not None and current.assignment.record and _graph_task_id() == -1:
            self._observer.note_held(current, storage)
