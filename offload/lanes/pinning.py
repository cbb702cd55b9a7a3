"""Pinning: makes host memory that a device can copy to and from while the host goes on.

torch's own pinned memory comes in powers of two and stays in its cache; an arena has to be exact
and to end. So the arena's slabs are ordinary memory that is registered with the driver. There is no
call for this in torch that fits every accelerator: ``PINNERS`` holds one adapter for each kind.
Where there is none, copies are right and block the host.
"""

from collections.abc import Callable
from typing import Protocol

import torch


class Pinner(Protocol):
    """Registers page-aligned memory of this process with a driver."""

    def pin(self, address: int, nbytes: int) -> None:
        """From now on a device may copy from and to it. Raises ``RuntimeError`` if refused."""

    def unpin(self, address: int) -> None:
        """Undo ``pin``, once no device is copying any more."""


class _CudaPinner:
    """CUDA, and ROCm under the same names in torch."""

    _PORTABLE = 1  # for every device, not only the current one

    def pin(self, address: int, nbytes: int) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, nbytes, self._PORTABLE)))

    def unpin(self, address: int) -> None:
        for device in range(torch.cuda.device_count()):
            torch.cuda.synchronize(device)
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        torch.cuda.check_error(int(runtime.cudaHostUnregister(address)))


PINNERS: dict[str, Callable[[], Pinner]] = {"cuda": _CudaPinner}


def pinner_for(device_type: str) -> Pinner | None:
    """The adapter for a kind of device; ``None`` where there is none."""
    make = PINNERS.get(device_type)
    return make() if make is not None else None
