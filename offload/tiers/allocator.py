"""AllocatorPeak: the most memory of an accelerator that torch's allocator had given out in a step.

The allocator keeps its own peak, which is the user's to reset. It is read and never reset here: a
peak that grew during the step is the step's. Otherwise the most that was seen counts: at the step's
beginning, where its backward began, and at its end.
"""

import torch

from offload.system.machine import indexed


class AllocatorPeak:
    """Of one device, for the steps of one session."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._record_bytes = 0  # the allocator's peak when the step began

    def begin(self) -> int:
        """A step begins; what is allocated now."""
        now_bytes, self._record_bytes = self._read()
        return now_bytes

    def look(self) -> int:
        """The most that is known of the step by now."""
        now_bytes, peak_bytes = self._read()
        return peak_bytes if peak_bytes > self._record_bytes else now_bytes

    def _read(self) -> tuple[int, int]:
        """Bytes allocated now, and at most since the allocator's peak was reset."""
        if self._device.type == "cpu":
            return 0, 0
        index = indexed(self._device).index
        try:
            # Not torch.accelerator.memory_stats, which flattens and sorts a hundred figures first.
            figures = torch._C._accelerator_getDeviceStats(index)["allocated_bytes"]["all"]
        except (RuntimeError, KeyError):  # a backend whose allocator keeps none
            return 0, 0
        return int(figures["current"]), int(figures["peak"])
