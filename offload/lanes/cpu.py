"""The lane of ``device="cpu"``, whose memory is host memory.

A copy out is a memory copy that is complete when it returns. A copy in is no copy at all: the
tensor aliases the slot.
"""

import ctypes
from collections.abc import Callable

import torch

from offload.engines import Engine, Slot
from offload.lanes.base import DONE, Fence, Passage
from offload.report.trace import NOTHING, Subject


class CpuLane:
    """Everything is complete when it returns."""

    host_is_device = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def saw(self, device: torch.device) -> None:
        pass

    def produced(self, storage: torch.UntypedStorage) -> object:
        return None

    def gather(
        self, source: torch.UntypedStorage, target: torch.UntypedStorage, begin: int, foreign: bool
    ) -> None:
        ctypes.memmove(target.data_ptr() + begin, source.data_ptr(), source.nbytes())

    def copy_out(
        self,
        slot: Slot,
        storage: torch.UntypedStorage,
        produced: object,
        *,
        checksum: bool,
        about: Subject = NOTHING,
    ) -> tuple[Fence, int | None]:
        if storage.data_ptr() == slot.address:  # filled there
            return DONE, self._engine.checksum(slot) if checksum else None
        return DONE, self._engine.copy(slot, storage, checksum=checksum)

    def copy_in(
        self, slot: Slot, copied: Fence, device: torch.device, about: Subject = NOTHING
    ) -> tuple[torch.UntypedStorage, Fence]:
        return self._engine.alias(slot), DONE

    def before_use(
        self, storage: torch.UntypedStorage, arrived: Fence, about: Callable[[], Subject] = Subject
    ) -> None:
        pass

    def let_go(
        self, storage: torch.UntypedStorage, copied: Fence, *, foreign: bool = False
    ) -> None:
        pass

    def host_reads(self, slot: Slot, copied: Fence) -> None:
        pass

    def host_writes(self, slot: Slot) -> None:
        pass

    def mark(self, moment: str, device: torch.device) -> bool:
        return False

    @property
    def in_flight(self) -> tuple[int, int]:
        return 0, 0

    def poll(self) -> list[Passage]:
        return []

    def drain(self) -> None:
        pass
