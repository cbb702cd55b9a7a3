"""Overruns: notices where more is alive, or is going to be, than the plan in force counts on.

The gate is strict then: what the plan meant to keep makes room for what runs. It is strict

- for a forward that begins when more is there than the plan leaves room for: the graph of an
  earlier forward that nobody has dropped, or results that somebody holds; and for all other
  forwards that wait for their backward beside that one;
- where a backward saves, or leaves its graph alive (``create_graph=True``, ``retain_graph=True``),
  or does not come to the segments in the reverse order of the forward; and where the budget was
  passed all the same. From then on that plan is known to be wrong, until another takes its place.

Without such a sign it is not: what a plan says that a segment needs is more than what is still to
come, as some of it may be there already, and nothing should leave for that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from offload.planner.observer import Observer
from offload.planner.record import Pass
from offload.report import Counters
from offload.tensors.live import LiveBytes
from offload.tiers import Tiers
from offload.units import format_bytes

__all__ = ["Overruns"]


class Overruns:
    """Of one controller. Only on the cpu, where what is kept may leave.

    Args:
        tiers: of the session.
        observer: tells what is there.
    """

    def __init__(self, tiers: Tiers, observer: Observer) -> None:
        self._tiers = tiers
        self._observer = observer
        self._data = LiveBytes()  # what is saved and no operation of a graph has made
        self._wrong: object = None  # the needs of a plan that did not hold
        self._told_over_bytes = self._told_evicted_bytes = 0
        # Of each pass that began, until it is known to be over.
        self._batches: list[tuple[weakref.ref[Pass], list[weakref.ref[torch.UntypedStorage]]]] = []

    def saw(self, tensor: Tensor, storage: torch.UntypedStorage) -> None:
        """``tensor`` is about to be saved."""
        if tensor.grad_fn is None:
            self._data.track(storage)

    def receive(
        self,
        current: Pass,
        batch: Iterable[torch.UntypedStorage],
        waiting: Iterable[weakref.ref[Pass]],
    ) -> None:
        """``current`` begins, with a batch that is the caller's: it counts from when it is saved
        until another begins and ``current`` is not ``waiting`` for its backward.
        """
        still = {id(p) for p in (r() for r in waiting) if p is not None}
        over = [storages for of, storages in self._batches if id(of()) not in still]
        self._batches = [known for known in self._batches if id(known[0]()) in still]
        self._batches.append((weakref.ref(current), [weakref.ref(s) for s in batch]))
        for refs in [*over, self._batches[-1][1]]:
            for storage in filter(None, (r() for r in refs)):
                self._tiers.live.forget(storage)
                self._data.forget(storage)

    def is_crowded(self, spare_bytes: int | None) -> bool:
        """Whether more is there than that, data apart, which stays from step to step."""
        if spare_bytes is None or self._tiers.in_child:
            return False
        return self._observer.staying_bytes() - self._data.alive_bytes > spare_bytes

    def is_strict(self, current: Pass, waiting: Iterable[Pass]) -> bool:
        """Whether the gate is to be, while ``current`` runs and the others wait."""
        crowded = current.crowded or any(p.crowded for p in waiting)
        return crowded or self._wrong is current.assignment.needs

    def judge(self, done: Pass, counters: Counters) -> None:
        """``done`` is over: did the plan hold? Says so in the step's report, if it did not."""
        gate = self._tiers.gate
        if gate.limit_bytes is None:
            return
        over_bytes = counters.peak_live_bytes - gate.limit_bytes
        if (gate.strict or over_bytes > 0) and not done.crowded:
            self._wrong = done.assignment.needs
        budget, evicted_bytes = format_bytes(gate.limit_bytes), counters.evicted_bytes
        if over_bytes > self._told_over_bytes:  # once, and again where it was more
            self._told_over_bytes = over_bytes
            counters.warnings[
                f"the device budget of {budget} was passed by {format_bytes(over_bytes)}: what was "
                "alive at one time is more than fits, and nothing else could leave. Raise "
                "device_budget, lower the batch, or let go of what earlier steps have made"
            ] += 1
        elif evicted_bytes > self._told_evicted_bytes:
            self._told_evicted_bytes = evicted_bytes
            counters.warnings[
                f"{format_bytes(evicted_bytes)} that were to stay have left in one step, to keep "
                f"the device budget of {budget}: that is slow. Something was alive that is not "
                "planned for: results or a graph of an earlier step, more forwards at one time, or "
                "a backward in another order, or of a backward. Let go of it, or plan for such "
                'steps: by "auto", or with a step for offload.plan that does the same'
            ] += 1
