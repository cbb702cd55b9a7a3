"""StepReport: what a step moved, how much of it was hidden, and what it waited for."""

import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from rich.table import Table

from offload.report import export, step_tables
from offload.report.advice import Advice, advice_on
from offload.report.compare import Comparison
from offload.report.counters import Counters, LaneCounters, WaitCounters
from offload.report.tables import text_of
from offload.report.trace import TRANSFERS, Subject, intersection_ns, merged, total_ns
from offload.units import SECONDS_PER_DAY, parse_bytes

JSON_FORMAT = 1
# What the makers promise of a consumer drive of 1 TB with three bits per cell: "600 TBW" in the
# data sheets of Samsung's 970 EVO Plus, 980 PRO and 990 PRO. Drives for data centres promise about
# one capacity a day for five years, 1,800 TB and more.
CONSUMER_ENDURANCE_BYTES = 600 * 10**12
_MAX_WAITS = 256  # different ones that a report names; the rest is added up as one
_OTHERS = "(others)"


@dataclass(frozen=True)
class Traffic:
    """What went over one lane.

    Attributes:
        nbytes: how much.
        operations: in how many transfers.
        seconds: time in which at least one of them ran.
        peak_depth: most of them on their way at one time.
    """

    nbytes: int
    operations: int
    seconds: float
    peak_depth: int

    @property
    def bytes_per_s(self) -> float | None:
        """The rate while at least one transfer ran; ``None`` if none did."""
        return self.nbytes / self.seconds if self.seconds else None


@dataclass(frozen=True)
class Wait:
    """What the computation waited for, and how long.

    Attributes:
        kind: ``"stall"``, for bytes to come back; ``"backpressure"``, for room to send them out.
        module: that had saved the bytes, by its name in a model that the session watches (see
            ``Session.watch``); else empty.
        operator: of backward, that asked for them; empty for backpressure.
        tensor: its dtype and shape; empty for backpressure.
        count: how often.
        seconds: in all.
    """

    kind: str
    module: str
    operator: str
    tensor: str
    count: int
    seconds: float


@dataclass(frozen=True)
class StepReport:
    """The figures of one step, or of several added up. Sizes in bytes, times in seconds.

    Attributes:
        steps: how many steps these figures cover.
        seconds: wall time inside the steps' ``with`` blocks.
        period_seconds: the same, with what came between the steps: the optimizer, loading data.
        saved_bytes: storages saved for backward that were considered, each counted once: those
            that ``kept_bytes`` counts before a decision (``small``, ``bundle``, ``parameter``,
            ``view``, ``policy``, ``fork``, ``backward``) are not among them.
        offloaded_bytes: storages that left memory, each counted once. What ``saved_bytes`` has
            beyond that, and beyond what was kept for ``budget`` or ``error``, was the newest
            (``keep_last_bytes``), or died before its turn.
        offloaded_blocks: how many they were.
        written_bytes: what really went to the disk, padded to whole pages.
        read_bytes: what really came back.
        reloaded_bytes: storages made on the device again.
        deduplicated_bytes: not moved again as another saved tensor shared the storage.
        kept_bytes: bytes that stayed in memory, by reason. ``small``: below the threshold.
            ``parameter``: a parameter, a view or an autocast copy of one. ``view``: a small part of
            a larger storage that needs no gradient. ``kind``: a kind of tensor that has no plain
            bytes. ``bundle``: in a bundle of small storages that did not get full. ``policy``,
            ``budget``, ``error``: so it was decided, there was no room, the disk failed.
            ``backward``: saved by backward itself. ``fork``: saved in a forked child.
        hits: backward asked for bytes that were there: in memory, or on the accelerator.
        lates: backward asked for bytes that were on their way.
        misses: backward asked for bytes whose way back had not begun.
        forwarded_bytes: asked for while still in memory, so that no read was needed.
        cancelled_bytes: transfers given up as nobody needed the bytes any more.
        stall_seconds: backward waiting for reads; on an accelerator also its computation waiting
            for copies, as its own clock tells.
        backpressure_seconds: forward waiting for room, likewise.
        transfer_seconds: time in which at least one transfer ran, over any lane.
        overlap: share of ``transfer_seconds`` in which the computation ran as well: it neither
            waited for us, nor (``device="cpu"``) made the copy itself; ``None`` if nothing was
            transferred.
        lanes: what went over each lane: ``offload`` from the device to host memory, ``reload``
            back, ``spill`` from there to the disk, ``fetch`` back.
        waits: what the computation waited for, longest first.
        peak_device_bytes: most device memory allocated by torch, as far as it was seen: exact
            where the step set a new record, else the most at its beginning, its end and where
            backward began; 0 on ``device="cpu"``.
        peak_arena_bytes: most host memory in use by bytes on their way.
        peak_live_bytes: most bytes in saved storages and the arena together.
        peak_disk_bytes: most bytes in use on the disk.
        warnings: what went otherwise than configured.

    Example:
        >>> import torch, offload
        >>> with offload.Session(min_offload_bytes=0, device="cpu") as session:
        ...     with session.step() as step:
        ...         torch.ones(64, 64, requires_grad=True).exp().sum().backward()
        >>> report = step.report
        >>> report.steps, report.saved_bytes, report.to_dict()["saved_bytes"]
        (1, 16384, 16384)
        >>> print(report)
                offload: 1 step
        ...
    """

    steps: int
    seconds: float
    period_seconds: float
    saved_bytes: int
    offloaded_bytes: int
    offloaded_blocks: int
    written_bytes: int
    read_bytes: int
    reloaded_bytes: int
    deduplicated_bytes: int
    kept_bytes: dict[str, int]
    hits: int
    lates: int
    misses: int
    forwarded_bytes: int
    cancelled_bytes: int
    stall_seconds: float
    backpressure_seconds: float
    transfer_seconds: float
    overlap: float | None
    lanes: dict[str, Traffic]
    waits: tuple[Wait, ...]
    peak_device_bytes: int
    peak_arena_bytes: int
    peak_live_bytes: int
    peak_disk_bytes: int
    warnings: tuple[str, ...]

    @classmethod
    def of(cls, steps: Iterable[Counters]) -> "StepReport":
        """The report of one step's counters, or the sum (for peaks, the maximum) of several."""
        reports = [_report_of_one(c) for c in steps]
        return reports[0] if len(reports) == 1 else cls.summed(reports)

    @classmethod
    def summed(cls, reports: "Iterable[StepReport]") -> "StepReport":
        """Add up reports: times and bytes add, peaks are the largest, the overlap is weighted by
        time.
        """
        parts = list(reports)
        hidden = sum(r.overlap * r.transfer_seconds for r in parts if r.overlap is not None)
        transfer = sum(r.transfer_seconds for r in parts)
        kept: Counter[str] = Counter()
        for r in parts:
            kept.update(r.kept_bytes)
        values: dict[str, Any] = {
            "kept_bytes": dict(kept),
            "overlap": hidden / transfer if transfer else None,
            "lanes": {n: _summed_traffic([r.lanes[n] for r in parts]) for n in TRANSFERS},
            "waits": _summed_waits(w for r in parts for w in r.waits),
            "warnings": tuple(dict.fromkeys(w for r in parts for w in r.warnings)),
        }
        for f in fields(cls):
            if f.name not in values:
                combine = max if f.name.startswith("peak_") else sum
                values[f.name] = combine([getattr(r, f.name) for r in parts] or [0])
        return cls(**values)

    # -- what follows from the fields --------------------------------------------------------------

    @property
    def waits_by_module(self) -> dict[str, float]:
        """Seconds waited for the bytes of each module, longest first; needs ``Session.watch``."""
        return self._waits_by(lambda wait: wait.module)

    @property
    def waits_by_tensor(self) -> dict[str, float]:
        """Seconds waited for each kind of tensor (operator of backward, dtype and shape), longest
        first.
        """
        return self._waits_by(lambda wait: f"{wait.operator} {wait.tensor}".strip())

    def _waits_by(self, key: Any) -> dict[str, float]:
        found: Counter[str] = Counter()
        for wait in self.waits:
            found[key(wait)] += wait.seconds  # type: ignore[assignment]
        return dict(found.most_common())

    @property
    def written_bytes_per_day(self) -> float:
        """Bytes that would go to the disk in a day of steps like these."""
        if not self.period_seconds:
            return 0.0
        return self.written_bytes / self.period_seconds * SECONDS_PER_DAY

    def drive_days(self, endurance: int | str = CONSUMER_ENDURANCE_BYTES) -> float | None:
        """Days of steps like these after which a drive has been written as often as its maker
        promises; ``None`` if nothing is written.

        Args:
            endurance: bytes that may be written in the drive's life ("TBW" in its data sheet), as
                an int or a text like ``"1200TB"``. Default: 600 TB, a consumer drive of 1 TB.

        Example:
            >>> from dataclasses import replace
            >>> none = StepReport.of([])
            >>> replace(none, written_bytes=3 * 10**9, period_seconds=1.0).drive_days("600TB") < 2.4
            True
        """
        endurance_bytes = parse_bytes(endurance, "endurance")
        per_day = self.written_bytes_per_day
        return endurance_bytes / per_day if per_day else None

    def advice(self) -> list[Advice]:
        """What these figures say is wrong, and what to do about it; empty if nothing is."""
        return advice_on(self)

    # -- in other forms ----------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Every field, plus the number of the format."""
        return {"format": JSON_FORMAT, **asdict(self)}

    def to_json(self) -> str:
        """``to_dict`` as JSON."""
        return json.dumps(self.to_dict())

    def scalars(self, prefix: str = "offload/") -> dict[str, float]:
        """Flat names and numbers for TensorBoard, Weights & Biases and their like: per step where
        that makes sense.

        Example:
            >>> StepReport.of([]).scalars()["offload/steps"]
            0.0
        """
        return export.scalars(self, prefix)

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """The figures in the text format that Prometheus scrapes.

        Args:
            labels: are given to every figure, ``{"rank": "0"}`` for instance.

        Example:
            >>> StepReport.of([]).prometheus({"rank": "0"}).splitlines()[2]
            'offload_steps_total{rank="0"} 0'
        """
        return export.prometheus(self, labels or {})

    def compare(self, other: "StepReport") -> Comparison:
        """This report beside another one, figure by figure and per step; also ``self - other``."""
        return Comparison.of(self, other)

    def __sub__(self, other: object) -> Comparison:
        if not isinstance(other, StepReport):
            return NotImplemented
        return self.compare(other)

    def __str__(self) -> str:
        return text_of(*step_tables.parts(self))

    def table(self) -> Table:
        """The main figures for people, as a ``rich`` table; ``str()`` adds lanes and waits."""
        return step_tables.summary(self)


def _summed_traffic(parts: list[Traffic]) -> Traffic:
    return Traffic(
        sum(t.nbytes for t in parts),
        sum(t.operations for t in parts),
        sum(t.seconds for t in parts),
        max((t.peak_depth for t in parts), default=0),
    )


def _summed_waits(waits: Iterable[Wait]) -> tuple[Wait, ...]:
    """Those for the same added up, longest first; what is beyond the bound as one of its kind."""
    found: dict[tuple[str, str, str, str], tuple[int, float]] = {}
    for w in waits:
        key = w.kind, w.module, w.operator, w.tensor
        count, seconds = found.get(key, (0, 0.0))
        found[key] = count + w.count, seconds + w.seconds
    ordered = sorted(found.items(), key=lambda item: (-item[1][1], item[0]))
    waits = [Wait(*key, *figures) for key, figures in ordered]
    named = [w for w in waits if w.module != _OTHERS]
    # What a part had beyond the bound stays so.
    rest = named[_MAX_WAITS:] + [w for w in waits if w.module == _OTHERS]
    del named[_MAX_WAITS:]
    for kind in sorted({w.kind for w in rest}):
        of_kind = [w for w in rest if w.kind == kind]
        count, seconds = sum(w.count for w in of_kind), sum(w.seconds for w in of_kind)
        named.append(Wait(kind, _OTHERS, "", "", count, seconds))
    return tuple(named)


def _traffic_of(counters: LaneCounters) -> Traffic:
    seconds = total_ns(merged(counters.intervals)) / 1e9
    return Traffic(counters.nbytes, counters.operations, seconds, counters.peak_depth)


def _wait_of(kind: str, about: Subject, counters: WaitCounters) -> Wait:
    tensor = str(about.tensor) if about.tensor is not None else ""
    seconds = counters.duration_ns / 1e9
    return Wait(kind, about.module, about.operator, tensor, counters.count, seconds)


def _report_of_one(c: Counters) -> StepReport:
    transfers, waits = c.transfers, merged(c.waits)
    transfer_ns = total_ns(transfers)
    ended_ns = c.ended_ns or time.perf_counter_ns()
    counted = {f.name: getattr(c, f.name) for f in fields(StepReport) if hasattr(c, f.name)}
    counted.update(
        steps=1,
        seconds=(ended_ns - c.started_ns) / 1e9,
        period_seconds=max(0, ended_ns - (c.since_ns or c.started_ns)) / 1e9,
        kept_bytes=dict(c.kept_bytes),
        stall_seconds=c.stall_ns / 1e9,
        backpressure_seconds=c.backpressure_ns / 1e9,
        transfer_seconds=transfer_ns / 1e9,
        overlap=1 - intersection_ns(transfers, waits) / transfer_ns if transfer_ns else None,
        lanes={name: _traffic_of(lane) for name, lane in c.lanes.items()},
        # A copy, made in one go: another thread may add to it meanwhile.
        waits=_summed_waits(_wait_of(*key, figures) for key, figures in list(c.waited_for.items())),
        warnings=tuple(c.warnings),
    )
    return StepReport(**counted)
