"""Many plans of one chain evaluated at once: the recurrence of ``model.py`` over vectors.

A search looks at tens of thousands of plans. One walk along the chain with a vector of plans at
each segment costs what a few dozen single walks would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from offload.planner.model import TOLERANCE_BYTES, UNLIMITED, Chain

__all__ = ["Evaluator"]

_FIELDS = (
    "resident_bytes", "offload_bytes", "present_bytes", "host_bytes", "disk_bytes",
    "late_bytes", "returning_bytes", "forward_seconds", "backward_seconds", "holds_output",
    "frees_input", "keeps_all",
)  # fmt: skip


class Evaluator:
    """The seconds of many plans of ``chain``.

    Example:
        >>> from offload.planner.model import Option, Segment
        >>> from offload.planner.predict import predict
        >>> keep = Option("keep", resident_bytes=8, present_bytes=8)
        >>> away = Option("host", offload_bytes=8, present_bytes=8)
        >>> layers = tuple(Segment(str(i), 1.0, 2.0, 8, (keep, away)) for i in range(3))
        >>> chain = Chain(layers, device_bytes=16, out_rate=4, back_rate=8)
        >>> Evaluator(chain)(torch.tensor([[0, 0, 0], [1, 1, 0]])).tolist()
        [inf, 10.0]
    """

    def __init__(self, chain: Chain) -> None:
        self.chain = chain
        segments = chain.segments
        self.widths = [len(s.options) for s in segments]
        width = max(self.widths)
        # A missing option is never chosen; its row only fills the table.
        padded = [[*s.options, *[s.options[0]] * (width - len(s.options))] for s in segments]
        self._tables = {
            name: torch.tensor(
                [[float(getattr(o, name)) for o in row] for row in padded], dtype=torch.float64
            )
            for name in _FIELDS
        }
        self._shared = [(i, *shared) for i, s in enumerate(segments) for shared in s.shared]
        self._lingering = [(i, *found) for i, s in enumerate(segments) for found in s.lingering]

    def __call__(self, choices: Tensor) -> Tensor:
        """Seconds of each row of ``choices`` (plans x segments, int64); infinite if infeasible."""
        if not len(choices):
            return torch.empty(0, dtype=torch.float64)
        columns = choices.t()  # one row per segment
        chosen = {name: table.gather(1, columns) for name, table in self._tables.items()}
        resident = chosen["resident_bytes"]
        if self._shared:
            resident = resident.clone()
        for i, back, nbytes in self._shared:
            resident[i - back] += (
                chosen["holds_output"][i - back] * chosen["frees_input"][i] * nbytes
            )
        others = self.chain.in_flight - 1
        before = resident.cumsum(0) - resident + others * resident.sum(0)
        chain, seconds = self.chain, torch.full((len(choices),), math.inf, dtype=torch.float64)
        forward_rooms = chain.device_bytes - before - chosen["present_bytes"]
        forward_rooms -= _column(s.forward_bytes + s.lingering_bytes() for s in chain.segments)
        for i, back, nbytes in self._lingering:
            forward_rooms[i] += chosen["keeps_all"][i - back] * nbytes
        backward_rooms = chain.device_bytes - before - chosen["returning_bytes"]
        backward_rooms = backward_rooms - _column(
            s.saved_bytes + s.backward_bytes for s in chain.segments
        )
        feasible = (forward_rooms >= -TOLERANCE_BYTES).all(0)
        feasible &= (backward_rooms >= -TOLERANCE_BYTES).all(0)
        feasible &= chosen["disk_bytes"].sum(0) * chain.in_flight <= chain.disk_bytes
        host_rooms: Tensor | None = None
        if math.isfinite(chain.host_bytes):
            resting = chosen["host_bytes"].cumsum(0) + chosen["disk_bytes"]
            resting = resting + others * chosen["host_bytes"].sum(0)
            host_rooms = chain.host_bytes - resting
            feasible &= (host_rooms >= -TOLERANCE_BYTES).all(0)
        alive = feasible.nonzero().flatten()
        if not len(alive):
            return seconds
        chosen = {name: values[:, alive] for name, values in chosen.items()}
        seconds[alive] = self._seconds(
            chosen,
            forward_rooms[:, alive],
            backward_rooms[:, alive],
            None if host_rooms is None else host_rooms[:, alive],
        )
        return seconds

    def _seconds(
        self,
        chosen: dict[str, Tensor],
        forward_rooms: Tensor,
        backward_rooms: Tensor,
        host_rooms: Tensor | None,
    ) -> Tensor:
        """See Note: the recurrence."""
        chain = self.chain
        ahead = chosen["forward_seconds"] + _column(s.forward_seconds for s in chain.segments)
        back = chosen["backward_seconds"] + _column(s.backward_seconds for s in chain.segments)
        moved, disk = chosen["offload_bytes"], chosen["disk_bytes"]
        late = chosen["late_bytes"]
        total = ahead.sum(0) + back.sum(0)
        out_bytes, back_bytes = map(chain.widened, (chain.window_bytes, chain.prefetch_bytes))
        waited, queue = _pass(
            ahead, (moved, late, disk), forward_rooms.clamp(max=out_bytes), host_rooms,
            (chain.out_rate, chain.write_rate),
        )  # fmt: skip
        total += waited.sum(0)
        waited, _ = _pass(
            back, (moved, late, disk), backward_rooms.clamp(max=back_bytes), host_rooms,
            (chain.back_rate, chain.read_rate),
        )  # fmt: skip
        total += waited.sum(0)
        for i in reversed(range(len(chain.segments))):
            queue = (queue - moved[i]).clamp_(min=0.0)
            over = (queue - backward_rooms[i]).clamp_(min=0.0)
            total += over / chain.out_rate
            queue = (queue - over - chain.out_rate * (back[i] + waited[i])).clamp_(min=0.0)
        return total


def _pass(
    seconds: Tensor,
    amounts: tuple[Tensor, Tensor, Tensor],
    rooms: Tensor,
    host_rooms: Tensor | None,
    rates: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Stalls of one direction, and what waits for the link in the end."""
    link, beyond = rates
    moved, late, disk = amounts
    three_tiers = host_rooms is not None and beyond < UNLIMITED
    queue = torch.zeros_like(seconds[0])
    writes = torch.zeros_like(queue)
    stalls = torch.zeros_like(seconds)
    for i in range(len(seconds)):
        stall = (queue - rooms[i]).clamp_(min=0.0) / link
        if three_tiers:
            assert host_rooms is not None
            stall = torch.maximum(stall, (writes - host_rooms[i]) / beyond)
            writes = (writes - beyond * (seconds[i] + stall)).clamp_(min=0.0) + disk[i]
        queue = torch.maximum(queue - link * (seconds[i] + stall) + moved[i], late[i])
        stalls[i] = stall
    return stalls, queue


def _column(values: Iterable[float]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.float64)[:, None]
