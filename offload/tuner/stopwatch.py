"""Stopwatches: where the computation is, and how much memory it has."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["DeviceStopwatch", "HostStopwatch", "Stopwatch", "stopwatch_for"]


class Stopwatch(Protocol):
    """When the computation was where; times in nanoseconds on one scale of its own."""

    def begin(self) -> None:
        """From now on time counts; nothing may be running."""

    def mark(self) -> object:
        """Where the computation is now. Does not wait."""

    def when_ns(self, mark: Any) -> int:
        """When it was there."""

    def host_ns(self) -> int:
        """What the host's own time is."""

    def end_ns(self) -> int:
        """Wait until the computation is done; when that was."""

    def memory_bytes(self) -> tuple[int, int] | None:
        """Device memory over that at ``begin``: the most since the last call, and now. None where
        it is not counted.
        """


class HostStopwatch:
    """Of ``device="cpu"``, where host and computation are one."""

    def begin(self) -> None:
        self._start_ns = time.perf_counter_ns()

    def mark(self) -> int:
        return self.host_ns()

    def when_ns(self, mark: Any) -> int:
        return int(mark)

    def host_ns(self) -> int:
        return time.perf_counter_ns() - self._start_ns

    def end_ns(self) -> int:
        return self.host_ns()

    def memory_bytes(self) -> tuple[int, int] | None:
        return None


class DeviceStopwatch:
    """Of an accelerator: events on the stream that computes.

    Args:
        device: the accelerator.
        host_clock_ns: the host's time, on the same scale as the device's.
    """

    def __init__(
        self, device: torch.device, host_clock_ns: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self._device = device
        self._clock_ns = host_clock_ns

    def begin(self) -> None:
        torch.accelerator.synchronize()
        self._base_bytes = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        self._origin: torch.Event = self._record()
        self._start_ns = self._clock_ns()

    def mark(self) -> torch.Event:
        return self._record()

    def when_ns(self, mark: Any) -> int:
        return int(1e6 * self._origin.elapsed_time(mark))

    def host_ns(self) -> int:
        return self._clock_ns() - self._start_ns

    def end_ns(self) -> int:
        last = self._record()
        torch.accelerator.synchronize()
        return self.when_ns(last)

    def memory_bytes(self) -> tuple[int, int] | None:
        most_bytes = torch.accelerator.max_memory_allocated() - self._base_bytes
        torch.accelerator.reset_peak_memory_stats()
        return most_bytes, torch.accelerator.memory_allocated() - self._base_bytes

    def _record(self) -> torch.Event:
        stream = torch.accelerator.current_stream(self._device)
        return stream.record_event(torch.Event(stream.device, enable_timing=True))


def stopwatch_for(device: torch.device) -> Stopwatch:
    """The stopwatch of a device."""
    return HostStopwatch() if device.type == "cpu" else DeviceStopwatch(device)
