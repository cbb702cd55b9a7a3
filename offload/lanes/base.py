"""What every lane offers: copies between a device and host slots, ordered against the computation.

A lane decides nothing. It returns a ``Fence`` for every copy it started; the state machine and all
above it see only this face.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from offload.engines import Slot
from offload.report.trace import NOTHING, Subject


class Fence(Protocol):
    """What stands between a copy and whoever needs its result."""

    def done(self) -> bool:
        """Whether the copy has completed (not merely been queued). Never waits."""

    def synchronize(self) -> None:
        """Let the host wait until the copy has completed."""


class Passage(NamedTuple):
    """A copy that has completed, or a wait of the device's computation for one.

    Times are the device's, on the scale of ``time.perf_counter_ns``: they compare exactly with each
    other and about with the host's.
    """

    name: str  # one of a trace's: "offload", "reload", "stall", "backpressure", or a moment
    nbytes: int  # of a copy
    start_ns: int
    end_ns: int
    about: Subject


class Lane(Protocol):
    """Copies in both directions."""

    host_is_device: bool  # the device's memory is host memory: it has no host tier of its own

    def saw(self, device: torch.device) -> None:
        """Something that stays was saved by the caller's stream, which therefore computes."""

    def produced(self, storage: torch.UntypedStorage) -> object:
        """``storage`` was saved just now by the caller's stream: where that stream is, for
        ``copy_out``, which may be called much later and by another stream.
        """

    def gather(
        self, source: torch.UntypedStorage, target: torch.UntypedStorage, begin: int, foreign: bool
    ) -> None:
        """Copy ``source`` to ``target`` from its byte ``begin`` on, behind the work that the
        caller's stream has queued. The caller may let go of ``source`` then. ``foreign``: as in
        ``let_go``.
        """

    def copy_out(
        self,
        slot: Slot,
        storage: torch.UntypedStorage,
        produced: object,
        *,
        checksum: bool,
        about: Subject = NOTHING,
    ) -> tuple[Fence, int | None]:
        """Start copying ``storage`` into ``slot`` once it has been ``produced``; returns its
        checksum as well, where it is asked for and the bytes pass through the processor.
        ``storage`` is held until ``let_go``. ``about`` goes into the passages.
        """

    def let_go(
        self, storage: torch.UntypedStorage, copied: Fence, *, foreign: bool = False
    ) -> None:
        """The caller is about to drop ``storage``, whose copy out may still be on its way: keep
        its memory from being used again before that has completed. ``foreign``: no operation of
        the graph made it, so another stream may have.
        """

    def copy_in(
        self, slot: Slot, copied: Fence, device: torch.device, about: Subject = NOTHING
    ) -> tuple[torch.UntypedStorage, Fence]:
        """Start copying ``slot``, once it was ``copied`` to, to a new storage on ``device``."""

    def before_use(
        self, storage: torch.UntypedStorage, arrived: Fence, about: Callable[[], Subject] = Subject
    ) -> None:
        """The caller's next device work uses ``storage``: order it after the copy that brings it.
        The host does not wait. ``about`` is only called if the device may have to.
        """

    def host_reads(self, slot: Slot, copied: Fence) -> None:
        """Host code is about to read ``slot``: returns when it may."""

    def host_writes(self, slot: Slot) -> None:
        """Host code is about to write ``slot``, which the caller has just allocated."""

    def mark(self, moment: str, device: torch.device) -> bool:
        """Let a passage tell when the caller's stream of ``device`` gets here; False where the
        host's clock tells as well.
        """

    @property
    def in_flight(self) -> tuple[int, int]:
        """Copies out and copies in that have not completed, as of the last ``poll``."""

    def poll(self) -> list[Passage]:
        """Let go of the slots of copies that have completed. Never waits.

        Returns:
            What has ended since the last call.
        """

    def drain(self) -> None:
        """Wait for everything that is in flight."""


class _Done:
    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


DONE: Fence = _Done()
