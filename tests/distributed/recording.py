"""A process group that writes down what is asked of it, and an engine that writes down what blocks.

One list takes both, in the order in which they happen on a rank.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from offload.engines import Engine, Request, Slot
from tests.doubles import WrappedEngine

Log = list[tuple[str, str]]
log: Log = []  # of this rank; torch makes the group, so it cannot be handed in


class RecordedWork(dist._Work):
    """A collective in flight."""

    def __init__(self, inner: Any, name: str) -> None:
        super().__init__()
        self._inner, self._name = inner, name

    def wait(self, timeout: timedelta | None = None) -> bool:
        log.append(("wait", self._name))
        return bool(self._inner.wait())

    def get_future(self) -> Any:
        return self._inner.get_future()


class RecordingGroup(dist.ProcessGroup):
    """Gloo, written down."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        self._count = 0

    def _launch(self, what: str, start: Callable[[], Any]) -> RecordedWork:
        self._count += 1
        name = f"{what} {self._count}"
        log.append(("launch", name))
        return RecordedWork(start(), name)

    def allreduce(self, tensors: Any, opts: Any = None) -> RecordedWork:
        tensors = tensors if isinstance(tensors, list) else [tensors]
        options = opts if opts is not None else dist.AllreduceOptions()
        what = f"allreduce of {[t.numel() for t in tensors]}"
        return self._launch(what, lambda: self._gloo.allreduce(tensors, options))

    def broadcast(self, tensors: Any, opts: Any = None) -> RecordedWork:
        return self._launch("broadcast", lambda: self._gloo.broadcast(tensors, opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> RecordedWork:
        return self._launch("allgather", lambda: self._gloo.allgather(outputs, inputs))

    def all_gather_single(self, output: Any, part: Any, opts: Any = None) -> RecordedWork:
        what = f"allgather of {part.numel()}"
        return self._launch(what, lambda: self._gloo._allgather_base(output, part))

    def reduce_scatter_single(self, output: Any, whole: Any, opts: Any = None) -> RecordedWork:
        what = f"reduce_scatter of {whole.numel()}"
        return self._launch(what, lambda: self._gloo._reduce_scatter_base(output, whole, opts))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:  # noqa: N802
        return "recording"


def recording_group() -> Any:
    """A group of all ranks; its log is empty."""
    if "RECORDING" not in dist.Backend._plugins:
        dist.Backend.register_backend("recording", RecordingGroup, devices=["cpu"])
    group = dist.new_group(backend="recording")
    log.clear()
    return group


class _Watched:
    """A request that is written down if somebody waits for it before it is done."""

    def __init__(self, inner: Request) -> None:
        self._inner = inner

    @property
    def start_ns(self) -> int:
        return self._inner.start_ns

    @property
    def end_ns(self) -> int:
        return self._inner.end_ns

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> bool:
        if not self._inner.done():
            log.append(("blocked", "by a transfer"))
        return self._inner.wait()

    def cancel(self) -> bool:
        return self._inner.cancel()

    def promote(self) -> None:
        self._inner.promote()


class WatchedEngine(WrappedEngine):
    """Says who waits for its transfers.

    Args:
        inner: does the work.
        at_once: a disk that always keeps up: transfers are over when they are asked for.
    """

    def __init__(self, inner: Engine, *, at_once: bool) -> None:
        super().__init__(inner)
        self._at_once = at_once

    def _watched(self, request: Request) -> Request:
        if self._at_once:
            request.wait()
        return _Watched(request)

    def write(self, slot: Slot, offset: int) -> Request:
        return self._watched(super().write(slot, offset))

    def read(self, slot: Slot, offset: int, *, urgent: bool, checksum: int | None) -> Request:
        return self._watched(super().read(slot, offset, urgent=urgent, checksum=checksum))
