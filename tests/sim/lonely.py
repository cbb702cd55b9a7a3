"""A process group of one rank, for any device: collectives that move nothing, or copy."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class _Over(dist._Work):
    """A collective that has ended, as far as the host is concerned: copies are ordered by their
    stream.
    """

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


class LonelyGroup(dist.ProcessGroup):
    """What DDP, FSDP and DTensor ask of a group."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)

    def allreduce(self, tensors: Any, opts: Any = None) -> _Over:
        return _Over(tensors)

    def broadcast(self, tensors: Any, opts: Any = None) -> _Over:
        return _Over(tensors)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Over:
        for output, part in zip(outputs, inputs, strict=True):
            output[0].copy_(part)
        return _Over(outputs)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Over:
        for output, parts in zip(outputs, inputs, strict=True):
            output.copy_(parts[0])
        return _Over(outputs)

    def all_gather_single(self, output: Any, part: Any, opts: Any = None) -> _Over:
        output.copy_(part.view_as(output))
        return _Over([output])

    def barrier(self, opts: Any = None) -> _Over:
        return _Over([])

    _allgather_base = reduce_scatter_single = _reduce_scatter_base = all_gather_single

    @property
    def group_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    def getBackendName(self) -> str:  # noqa: N802
        return "lonely"


def start() -> None:
    """Make the default group; ``dist.destroy_process_group`` ends it."""
    if "LONELY" not in dist.Backend._plugins:
        dist.Backend.register_backend("lonely", LonelyGroup, devices=["cpu", "sim"])
    dist.init_process_group("lonely", rank=0, world_size=1, store=dist.HashStore())
