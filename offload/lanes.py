"""Lanes: copies between a device and host slots, ordered against the computation.

A lane returns a ``Fence`` for what it started. On ``device="cpu"`` the device is host memory: a
copy out is a memory copy that is complete when it returns, and a copy in is no copy at all, as the
tensor aliases the slot. An accelerator needs a lane of its own and nothing else: the state machine
and all above it only see this face.
"""

from typing import Protocol

import torch

from offload.engines import Engine, Slot


class Fence(Protocol):
    """What a consumer waits on before it touches what a lane moves."""

    def done(self) -> bool:
        """Whether the copy has completed (not merely been queued)."""

    def wait(self) -> None:
        """Order the caller's next device work after the copy."""


class Lane(Protocol):
    """Copies in both directions."""

    def copy_out(
        self, slot: Slot, storage: torch.UntypedStorage, *, checksum: bool
    ) -> tuple[Fence, int | None]:
        """Start copying ``storage`` into ``slot``. ``storage`` must be held until the fence is
        done.
        """

    def copy_in(self, slot: Slot) -> tuple[torch.UntypedStorage, Fence]:
        """A device storage with the bytes of ``slot``, in order after the fence."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


DONE = _Done()


class CpuLane:
    """The null adapter: everything is complete when it returns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def copy_out(
        self, slot: Slot, storage: torch.UntypedStorage, *, checksum: bool
    ) -> tuple[Fence, int | None]:
        return DONE, self._engine.copy(slot, storage, checksum=checksum)

    def copy_in(self, slot: Slot) -> tuple[torch.UntypedStorage, Fence]:
        return self._engine.alias(slot), DONE
