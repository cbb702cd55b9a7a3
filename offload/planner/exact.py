"""The exact plan: a mixed-integer linear program, solved by HiGHS through scipy.

Binary variables choose an option for each segment; continuous ones are the stalls and the queues of
``model.py``'s recurrence. Its maxima become inequalities: a queue only ever hurts, so minimising
pushes every one down onto the largest of its bounds. With ``O`` options and ``L`` segments there
are ``L O`` binary and ``14 L`` continuous variables in about ``20 L`` rows.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

from offload.errors import OffloadError
from offload.planner.model import Chain, Shared

__all__ = ["Exact", "solve_exact"]

Terms = dict[int, float]
_QUEUES = ("Q", "W", "P", "U")  # out, to the disk, back, from the disk


@dataclass(frozen=True)
class Exact:
    """What the solver found.

    Attributes:
        choice: the option of each segment; ``None`` if it found none in time, or there is none.
        gap: by what part of its time the plan may be slower than the best there is.
        proven: no better one exists, or none at all.
    """

    choice: tuple[int, ...] | None
    gap: float
    proven: bool


def solve_exact(chain: Chain, *, seconds: float = 30.0, gap: float = 0.0) -> Exact:
    """The fastest plan within the budgets.

    Args:
        chain: the segments and budgets.
        seconds: stop the search after so long, with the best found.
        gap: stop at a plan that is proven to be within this part of the best.

    Raises:
        OffloadError: scipy is not installed.
    """
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_matrix
    except ImportError as e:
        raise OffloadError(
            'solver="exact" needs scipy: pip install "offload[planner]", or use the built-in search'
        ) from e
    scaled = _scaled(chain)
    program = _Program(scaled)
    rows, columns, values = program.entries
    shape = (len(program.low), program.size)
    matrix = csr_matrix((values, (rows, columns)), shape=shape)
    continuous = program.size - program.binaries
    found: Any = milp(
        program.cost,
        constraints=LinearConstraint(matrix, program.low, program.high),
        integrality=np.r_[np.ones(program.binaries), np.zeros(continuous)],
        bounds=Bounds(
            np.zeros(program.size), np.r_[np.ones(program.binaries), np.full(continuous, np.inf)]
        ),
        options={"time_limit": seconds, "mip_rel_gap": gap},
    )
    if found.x is None:
        return Exact(None, math.inf, proven=found.status == 2)
    starts = program.starts
    choice = tuple(
        int(np.argmax(found.x[starts[i] : starts[i + 1]])) for i in range(len(chain.segments))
    )
    # The gap is of the objective, which leaves out what no plan can change.
    constant = scaled.compute_seconds
    whole = (found.fun - found.mip_dual_bound) / max(found.fun + constant, 1e-12)
    return Exact(choice, max(0.0, float(whole)), proven=found.status == 0)


def _scaled(chain: Chain) -> Chain:
    """Bytes in budgets and seconds in steps, as the solver's tolerances are absolute."""
    byte, second = max(chain.device_bytes, 1.0), max(chain.compute_seconds, 1e-9)
    fastest = 1e6  # budgets in a step: beyond it a rate only spoils the numbers

    def scaled(part: Any) -> dict[str, Any]:
        unit_of = {name: byte if name.endswith("_bytes") else second for name in vars(part)}
        return {
            name: value / unit_of[name]
            for name, value in vars(part).items()
            if _is_size(name) and value is not None
        }

    segments = tuple(
        replace(
            s,
            **scaled(s),
            options=tuple(replace(o, **scaled(o)) for o in s.options),
            shared=tuple(Shared(back, nbytes / byte) for back, nbytes in s.shared),
            lingering=tuple(Shared(back, nbytes / byte) for back, nbytes in s.lingering),
        )
        for s in chain.segments
    )
    rates = {
        name: min(value * second / byte, fastest)
        for name, value in vars(chain).items()
        if name.endswith("_rate")
    }
    return replace(chain, **scaled(chain), **rates, segments=segments)


def _is_size(name: str) -> bool:
    return name.endswith(("_bytes", "_seconds"))


class _Program:
    """The rows and the objective, of a scaled chain."""

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        self.starts = [0]
        for s in chain.segments:
            self.starts.append(self.starts[-1] + len(s.options))
        self.binaries = self.starts[-1]
        self._first: dict[str, int] = {}
        self.size = self.binaries
        for name in ("sf", "sb", "sr", "Rs", "R", *_QUEUES, *(q + "s" for q in _QUEUES)):
            self._first[name] = self.size
            self.size += len(chain.segments)
        self._held: defaultdict[int, list[int]] = defaultdict(list)  # columns, by who holds
        self.low: list[float] = []
        self.high: list[float] = []
        self.entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        for i in range(len(chain.segments)):
            self._share(i)
        self.cost = self._objective()
        for i in range(len(chain.segments)):
            self._choose_one(i)
            self._queues(i)
            self._rooms(i)
            self._leftover(i)
        if math.isfinite(chain.disk_bytes):
            everywhere = range(len(chain.segments))
            disk_bytes = chain.disk_bytes / chain.in_flight
            self._row(self._sum(everywhere, "disk_bytes"), high=disk_bytes)

    # -- terms ------------------------------------------------------------------------------------

    def _option(self, i: int, name: str, scale: float = 1.0) -> Terms:
        """``scale`` times what segment ``i``'s chosen option has under ``name``."""
        return {
            self.starts[i] + k: scale * float(getattr(o, name))
            for k, o in enumerate(self.chain.segments[i].options)
        }

    def _sum(self, segments: range, name: str) -> Terms:
        return _merged(*(self._option(j, name) for j in segments))

    def _variable(self, name: str, i: int, scale: float = 1.0) -> Terms:
        inside = 0 <= i < len(self.chain.segments)
        return {self._first[name] + i: scale} if inside else {}

    def _resident(self, i: int) -> Terms:
        """Of all segments before ``i``, and of all that other forwards keep."""
        return _merged(self._kept(i), self._of_others(self._kept(len(self.chain.segments))))

    def _kept(self, i: int) -> Terms:
        held = {column: 1.0 for j in range(i) for column in self._held[j]}
        return _merged(self._sum(range(i), "resident_bytes"), held)

    def _of_others(self, one: Terms) -> Terms:
        others = self.chain.in_flight - 1
        return {column: others * value for column, value in one.items()} if others else {}

    def _row(self, terms: Terms, low: float = -math.inf, high: float = math.inf) -> None:
        rows, columns, values = self.entries
        for column, value in terms.items():
            if value:
                rows.append(len(self.low))
                columns.append(column)
                values.append(value)
        self.low.append(low)
        self.high.append(high)

    # -- rows -------------------------------------------------------------------------------------

    def _objective(self) -> list[float]:
        cost = [0.0] * self.size
        for i, s in enumerate(self.chain.segments):
            for k, o in enumerate(s.options):
                cost[self.starts[i] + k] = o.forward_seconds + o.backward_seconds
            for stall in ("sf", "sb", "sr"):
                cost[self._first[stall] + i] = 1.0
        return cost

    def _choose_one(self, i: int) -> None:
        options = self.chain.segments[i].options
        self._row({self.starts[i] + k: 1.0 for k in range(len(options))}, 1.0, 1.0)

    def _share(self, i: int) -> None:
        for back, nbytes in self.chain.segments[i].shared:
            # held >= nbytes * (holds_output(i - back) + frees_input(i) - 1)
            both = _merged(
                self._option(i - back, "holds_output", -nbytes),
                self._option(i, "frees_input", -nbytes),
            )
            self._row({**both, self.size: 1.0}, low=-nbytes)
            self._held[i - back].append(self.size)
            self.size += 1

    def _queues(self, i: int) -> None:
        chain, s = self.chain, self.chain.segments[i]
        ahead, back = ("sf", "forward_seconds"), ("sb", "backward_seconds")
        kinds: list[tuple[str, tuple[str, str], float, str]] = [
            ("Q", ahead, chain.out_rate, "offload_bytes"),
            ("P", back, chain.back_rate, "offload_bytes"),
            ("W", ahead, chain.write_rate, "disk_bytes"),
            ("U", back, chain.read_rate, "disk_bytes"),
        ]
        for name, (stall, seconds), rate, amount in kinds:
            after = self._variable(name + "s", i)
            # what is left of the queue after the stall, and after the computation
            self._row(
                _merged(after, self._variable(stall, i, rate), self._variable(name, i - 1, -1.0)),
                low=0.0,
            )
            run = self._option(i, seconds, rate)
            added = self._option(i, amount, -1.0)
            left = _merged(self._variable(name, i), self._variable(name + "s", i, -1.0), added, run)
            self._row(left, low=-rate * getattr(s, seconds))
            late = "late_bytes" if amount == "offload_bytes" else amount
            self._row(_merged(self._variable(name, i), self._option(i, late, -1.0)), low=0.0)

    def _rooms(self, i: int) -> None:
        chain, s = self.chain, self.chain.segments[i]
        there = self._resident(i)
        present = self._option(i, "present_bytes")
        room = chain.device_bytes - s.forward_bytes - s.lingering_bytes()
        kept = [self._option(i - back, "keeps_all", -nbytes) for back, nbytes in s.lingering]
        self._row(_merged(there, self._variable("Qs", i), present, *kept), high=room)
        room = chain.device_bytes - s.saved_bytes - s.backward_bytes
        returning = self._option(i, "returning_bytes")
        self._row(_merged(there, self._variable("Ps", i), returning), high=room)
        for queue, limit in (("Qs", chain.window_bytes), ("Ps", chain.prefetch_bytes)):
            if math.isfinite(limit):
                self._row(self._variable(queue, i), high=chain.widened(limit))
        if math.isfinite(chain.host_bytes):
            everywhere = range(len(chain.segments))
            others = self._of_others(self._sum(everywhere, "host_bytes"))
            resting = _merged(self._sum(range(i + 1), "host_bytes"), others)
            passing = self._option(i, "disk_bytes")
            for queue in ("Ws", "Us"):
                terms = _merged(resting, self._variable(queue, i), passing)
                self._row(terms, high=chain.host_bytes)

    def _leftover(self, i: int) -> None:
        chain, s = self.chain, self.chain.segments[i]
        rate, last = chain.out_rate, len(chain.segments) - 1
        before = self._variable("R", i + 1, -1.0) if i < last else self._variable("Q", last, -1.0)
        waits = _merged(self._variable("Rs", i), self._variable("sr", i, rate), before)
        self._row(_merged(waits, self._option(i, "offload_bytes")), low=0.0)
        room = chain.device_bytes - s.saved_bytes - s.backward_bytes
        returning = self._option(i, "returning_bytes")
        self._row(_merged(self._resident(i), self._variable("Rs", i), returning), high=room)
        left = _merged(
            self._variable("R", i),
            self._variable("Rs", i, -1.0),
            self._variable("sb", i, rate),
            self._option(i, "backward_seconds", rate),
        )
        self._row(left, low=-rate * s.backward_seconds)


def _merged(*terms: Terms) -> Terms:
    total: defaultdict[int, float] = defaultdict(float)
    for part in terms:
        for column, value in part.items():
            total[column] += value
    return total
