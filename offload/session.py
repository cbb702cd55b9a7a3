"""Session: the context manager around training steps. It wires the parts and owns them."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, overload

import torch

from offload.blocks.placement import Policy, offload_all
from offload.config import Config
from offload.engines import Engine
from offload.errors import StateError, StorageError, warn_user
from offload.hooks.pack import Hooks
from offload.lanes import Lane
from offload.planner.applied import Planned
from offload.planner.plan import Plan
from offload.recompute.drift import RecomputeReport
from offload.recompute.rules import Applied, Rules, apply_rules
from offload.recompute.verify import Verifier
from offload.report import Counters, StepReport
from offload.report.reporter import Reporter
from offload.report.scopes import Watching, expect_model
from offload.report.trace import Trace
from offload.step import Running, Step
from offload.tiers import Tiers
from offload.units import parse_bytes


class Session:
    """Keeps the activations of training steps in host memory and on disk from forward to backward.

    Args:
        config: the options, if they were put together before.
        policy: asked for every tensor that may leave: where does it go? By default to the next
            slower tier: from an accelerator to host memory, from the CPU to the disk.
        **options: the fields of ``Config``, e.g. ``disk_dir="/nvme"``, ``window_bytes="64MiB"``.

    Raises:
        TypeError, ValueError: an option that cannot work; the message says the fix.
        OSError: the scratch file cannot be made.

    Gradients are bit-identical to those without a session. It may be used by several threads, each
    of which enters steps of its own; steps of one session may be nested, the outermost counts.

    Example:
        >>> import torch, offload
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh())
        >>> with offload.Session(min_offload_bytes=0, keep_last_bytes=0) as session:
        ...     with session.step() as step:
        ...         model(torch.randn(256, 64)).sum().backward()
        >>> step.report.offloaded_bytes > 500_000
        True
    """

    def __init__(
        self,
        config: Config | None = None,
        *,
        policy: Policy = offload_all,
        _engine: Engine | None = None,
        _lane: Callable[[Engine], Lane] | None = None,
        **options: Any,
    ) -> None:
        if not callable(policy):
            raise TypeError(f"policy is {policy!r}; give a function from SavedTensor to Placement")
        self.config = Config.given(config, options)
        self._warned = False
        self._finished: StepReport = StepReport.of([])
        self._counters: Counters | None = None  # of the newest step
        self._ended_ns = 0  # of the one before it
        self._running = Running()
        self._open_steps: dict[int, Counters] = {}  # in all threads, by identity
        self._planned: Planned | None = None
        self._tiers = Tiers(self.config, _engine, _lane)
        self._hooks = Hooks(self.config, policy, self._tiers)
        self._verifier = Verifier() if self.config.verify_recompute else None
        self._reporter = Reporter()
        self._closed = False
        for message in self.config.warnings():
            warn_user(message)

    @classmethod
    def from_file(
        cls, path: "str | os.PathLike[str]", *, policy: Policy = offload_all, **options: Any
    ) -> "Session":
        """A session with the options of a file.

        Args and errors are those of ``Config.from_file``, and those of a session.
        """
        return cls(Config.from_file(path, **options), policy=policy)

    def step(self) -> Step:
        """A context manager for one training step: forward, or forward and backward.

        Raises (from the ``with`` statement):
            StateError: the session is closed, or the step was entered before.
            StorageError: with ``on_error="raise"``, a write of the step failed.
        """
        return Step(self)

    @overload
    def apply(
        self,
        model: torch.nn.Module,
        rules: Plan | str,
        *,
        segments: Sequence[str] | None = None,
        device_budget: int | str | None = None,
    ) -> Planned: ...

    @overload
    def apply(self, model: torch.nn.Module, rules: Rules) -> Applied: ...

    def apply(
        self,
        model: torch.nn.Module,
        rules: Rules | Plan | str,
        *,
        segments: Sequence[str] | None = None,
        device_budget: int | str | None = None,
    ) -> Applied | Planned:
        """Say module by module what becomes of activations, until ``remove()`` is called on the
        result or its context is left; a plan ends with the session at the latest.

        Args:
            model: its modules are ruled. Nothing of it changes but the class of those, to a
                subclass of the same name: not ``state_dict``, names, hooks, signatures; copies and
                pickles made meanwhile are as if no rules were applied.
            rules: what to do, by which modules: a glob of names (``"blocks.*.mlp"``; ``*`` stands
                for one component of a name or a part of it, ``**`` for any number of components), a
                module class, a function ``(name, module) -> bool``, or ``every(k, ...)`` of
                ``offload.recompute``. The actions are ``"keep"``, ``"host"``, ``"disk"``,
                ``"recompute"``, ``"recompute+host"``, ``"recompute+disk"`` and ``"selective"``;
                ``offload.recompute.Action`` explains them. Or a ``Plan``; or ``"auto"``: measure
                in the first steps, which are exact as ever, then plan for the session's
                ``device_budget``, and again for new shapes of input or when things change.
            segments: for ``"auto"``, the names of the modules to plan for; by default the model's
                repeated blocks.
            device_budget: for ``"auto"``, in place of the session's; bytes as an int or a text.

        From the outside in, a module goes by the first rule that matches it, and all inside it go
        by the same rule until another matches. Placements concern what is saved while the module's
        forward runs, in steps of this session and on the thread that runs it; of two modules within
        each other the inner one's counts. Inside a module that is recomputed nothing is saved, so
        that an inner placement has no effect there; an inner recomputation is a checkpoint within a
        checkpoint, which computes once more. Recomputation takes place outside steps as well.

        Compile the modules that are ruled, or what is inside them, by ``module.compile()`` or
        ``torch.compile``: their code stays as it is, without a break. If a module around them is
        compiled, its graph ends before each of them and begins again behind it, and what is
        recomputed is not compiled.

        Raises:
            ValueError: a rule matches no module, or an action is not known.
            TypeError: a rule has another form, or a module is a ``ScriptModule``.
            StateError: a module is ruled already.
            PlanError: the plan is for another model, or there is no budget to plan for; from a
                step, that no plan fits the budget.

        Example:
            >>> import torch, offload
            >>> layer = lambda: torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
            >>> model = torch.nn.Sequential(*(layer() for _ in range(4)))
            >>> x = torch.randn(256, 64, requires_grad=True)
            >>> with offload.Session(min_offload_bytes=0, keep_last_bytes=0) as session:
            ...     with session.apply(model, {"0": "keep", "*": "recompute+disk"}):
            ...         with session.step() as step:
            ...             model(x).sum().backward()
            >>> step.report.offloaded_bytes == 3 * 256 * 64 * 4  # the inputs of layers 1, 2 and 3
            True
        """
        if isinstance(rules, (Plan, str)):
            return self._plan(model, rules, segments, device_budget)
        if segments is not None or device_budget is not None:
            raise TypeError('segments and device_budget are for "auto", not for rules')
        return apply_rules(model, rules, self._hooks.placed)

    def watch(self, model: torch.nn.Module) -> Watching:
        """Know which module saved what, until ``remove()`` is called on the result or its context
        is left: for ``StepReport.waits`` and the trace. Hooks on every module of ``model`` tell,
        about a microsecond per forward of a module; without this call there are none.

        Example:
            >>> import torch, offload
            >>> model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.Tanh())
            >>> with offload.Session(min_offload_bytes=0, keep_last_bytes=0) as session:
            ...     with session.watch(model), session.step():
            ...         model(torch.randn(256, 64)).sum().backward()
            ...     sorted({e.about.module for e in session.trace.events() if e.name == "offload"})
            ['0', '1']
        """
        return self._hooks.scopes.watch(model)

    @property
    def trace(self) -> Trace:
        """What happened lately: a bounded ring of events, always on."""
        return self._tiers.trace

    def log_every(self, steps: int, callback: Callable[[StepReport], object]) -> None:
        """Call ``callback`` with the report of every so many steps, added up.

        A step counts as finished when the next one begins, as its backward may come after its
        block; ``close`` reports what is left. It is called on the thread that begins the step.
        Steps that a callback runs itself are in its next report. A callback that raises costs one
        warning and is not called again: training goes on.

        Args:
            steps: how many go into one report.
            callback: what is done with it.

        Raises:
            ValueError: ``steps`` is below 1.
            TypeError: ``callback`` cannot be called.

        Example:
            >>> import torch, offload
            >>> logged = []
            >>> with offload.Session() as session:
            ...     session.log_every(2, lambda report: logged.append(report.scalars()))
            ...     for _ in range(5):
            ...         with session.step():
            ...             pass
            >>> [figures["offload/steps"] for figures in logged]
            [2.0, 2.0, 1.0]
        """
        self._reporter.add(steps, callback)

    def _plan(
        self,
        model: torch.nn.Module,
        plan: Plan | str,
        segments: Sequence[str] | None,
        device_budget: int | str | None,
    ) -> Planned:
        if isinstance(plan, str) and plan != "auto":
            raise ValueError(f'rules are {plan!r}; give "auto", a Plan, or a mapping of rules')
        expect_model(model)
        if self._planned is not None:
            raise StateError("a plan is in force already: remove() it first")
        if self._open_steps:
            raise StateError("a plan is applied between steps, not inside one")
        if device_budget is not None:
            device_budget = parse_bytes(device_budget, "device_budget")

        def removed() -> None:
            self._planned = None

        self._planned = Planned(
            model,
            plan,
            self._hooks,
            self._tiers,
            lambda: self._running.counters is not None,
            removed,
            segments=segments,
            device_budget=device_budget,
        )
        return self._planned

    def report(self) -> StepReport:
        """The figures of all steps so far, added up."""
        with self._tiers.lock:  # another thread may begin a step meanwhile
            if not (self._closed or self._tiers.in_child):
                self._tiers.poll()  # what has ended since the last step
            newest = [] if self._counters is None else [StepReport.of([self._counters])]
            return StepReport.summed([self._finished, *newest])

    def recompute_report(self) -> RecomputeReport:
        """How far recomputed values were from those of the forward, in all steps so far.

        Raises:
            StateError: the session was opened without ``verify_recompute``.
        """
        if self._verifier is None:
            raise StateError(
                "recomputed values were not compared: open the session with verify_recompute=True"
            )
        return self._verifier.report()

    @property
    def held_bytes(self) -> int:
        """Bytes of host memory in use now for what is on its way, or at rest there."""
        with self._tiers.lock:
            return self._tiers.host.held_bytes

    def drain(self) -> None:
        """Finish what is in flight, and count it: afterwards no transfer runs."""
        with self._tiers.lock:
            if self._closed or self._tiers.in_child:
                return
            self._tiers.drain()
            if self.config.device.type != "cpu":
                torch.accelerator.synchronize()  # its waits have ended, too
            self._tiers.poll()
            failure = self._tiers.failure
        self._warn(failure)

    def close(self) -> None:
        """Finish what is in flight and let go of memory, threads and file. May be called twice.

        Graphs that still wait for their backward keep what they need until they are done.

        Raises:
            StateError: a step is open.
        """
        with self._tiers.lock:
            if self._open_steps:
                raise StateError("the session cannot be closed while one of its steps is open")
            self._closed = True
            newest = self._counters
            if not self._tiers.in_child:
                self._hooks.when_done(lambda: None)  # not in the middle of what follows
                self._tiers.drain()  # what is in flight holds its blocks
                self._hooks.wait_for_autograd()
            failure = self._tiers.failure
            self._hooks.when_done(self._tiers.close)
        if self._planned is not None:
            self._planned.remove()
        if self._reporter.is_open and not self._tiers.in_child:
            self._reporter.close(StepReport.of([] if newest is None else [newest]))
        self._warn(failure)

    def _take_newest(self) -> StepReport | None:
        """Count the newest step among the finished ones."""
        if self._counters is None:
            return None
        newest = StepReport.of([self._counters])
        self._finished = StepReport.summed([self._finished, newest])
        self._ended_ns = self._counters.ended_ns
        self._counters = None
        return newest

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Session holds threads and an open file and cannot be copied or pickled; make one in "
            "each process (its Config can be passed on)"
        )

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, _: object, exc: BaseException | None, tb: object) -> None:
        try:
            self.close()
        except StateError:
            if exc is None:
                raise  # and otherwise what went wrong first is what is told

    def _running_step(self) -> Counters | None:
        """The step that this thread is in. Inside a backward, which may be on another thread than
        its forward, that is the newest: what is computed again there begins none of its own.
        """
        running = self._running.counters
        if running is None and torch._C._current_graph_task_id() != -1:
            return self._counters
        return running

    def _begin(self, counters: Counters) -> None:
        with self._tiers.lock:
            self._expect_open()
            if not self._tiers.in_child:
                self._tiers.poll()  # what has ended, or failed, belongs to the step before
            failure = self._tiers.failure
            newest = self._take_newest()
        # Before this step begins: a callback may run steps of its own, or be interrupted.
        self._reporter.report(newest)
        self._warn(failure)
        with self._tiers.lock:
            self._expect_open()
            self._reporter.keep(self._take_newest())
            counters.since_ns = self._ended_ns
            self._counters = counters
            self._open_steps[id(counters)] = counters
            self._hooks.begin_step(counters)
        if self._planned is not None:
            self._planned.begin_step(counters)

    def _expect_open(self) -> None:
        if self._closed:
            raise StateError("the session is closed; open a new one")

    def _end(self, counters: Counters) -> StorageError | None:
        """The step's first failure of the disk, if there was one. May be called twice."""
        with self._tiers.lock:
            if id(counters) not in self._open_steps:
                return None
            self._tiers.end_step()
            counters.ended_ns = time.perf_counter_ns()
            del self._open_steps[id(counters)]
            error, failure = self._tiers.error, self._tiers.failure
        if self._planned is not None:
            self._planned.end_step()
        self._warn(failure)
        return error

    def _warn(self, failure: str) -> None:
        if failure and not self._warned:
            self._warned = True  # once: every step's report has its own
            warn_user(failure)
