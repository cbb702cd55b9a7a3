"""The replay of an accelerator: copies on two side streams, and a host that runs ahead."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from offload.engines.budget import LEAST_MOVING, has_room
from offload.probe import MachineProfile
from offload.tuner.record import StepRecord, Touch
from offload.tuner.replay import Replay
from offload.tuner.setting import Setting

__all__ = ["LinkReplay"]


class _Copy(NamedTuple):
    block: int
    end_ns: float


class LinkReplay(Replay):
    """Device to host memory and back. Bytes alive are those on the device.

    The computation waits for a copy out when the window is full, and for a copy in that was not
    done in time. Whether a copy is done *for the host*, which runs ahead, decides when a storage
    passes from device to host: what the host has not seen leave when backward begins is used where
    it is.
    """

    def __init__(self, record: StepRecord, setting: Setting, profile: MachineProfile) -> None:
        super().__init__(record, setting, profile)
        assert self.profile.link_out_bytes_per_s and self.profile.link_in_bytes_per_s
        self._out_ns = 1e9 / self.profile.link_out_bytes_per_s  # of a byte
        self._in_ns = 1e9 / self.profile.link_in_bytes_per_s
        self._latency_ns = 1e9 * (self.profile.link_latency_seconds or 0.0)
        self._host_ns = 0.0
        self._out_free_ns = self._in_free_ns = 0.0
        self._window_bytes = 0
        self._copies: deque[_Copy] = deque()  # not yet settled, oldest first
        self._produced_ns: dict[int, float] = {}
        self._copied_ns: dict[int, float] = {}  # when the copy out of a block that left ends
        self._away: set[int] = set()  # settled: only in host memory
        self._arrives_ns: dict[int, float] = {}  # of blocks that were brought back

    def saved(self, touch: Touch) -> None:
        self._produced_ns[touch.block] = self.now_ns
        self._poll(touch)

    def send_out(self, block: int) -> bool:
        nbytes = self.record.blocks[block].nbytes
        limit_bytes = self.setting.window_bytes
        while not has_room(self._window_bytes, nbytes, limit_bytes, LEAST_MOVING):
            end_ns = self._copies[0].end_ns
            if end_ns > self._host_ns:
                self.wait(end_ns, "backpressure_ns")
            self._settle_oldest()
        start_ns = max(self._produced_ns[block], self._out_free_ns)
        self._out_free_ns = start_ns + self._latency_ns + nbytes * self._out_ns
        self._copied_ns[block] = self._out_free_ns
        self._copies.append(_Copy(block, self._out_free_ns))
        self._window_bytes += nbytes
        self._settle_done()
        return True

    def is_away(self, block: int) -> bool:
        return block in self._away and block not in self._arrives_ns

    def prefetch(self, block: int) -> bool:
        self._bring(block)
        return True

    def demand(self, touch: Touch) -> None:
        self._poll(touch)
        block = touch.block
        present = block not in self._away or self.record.blocks[block].held
        if not present and block not in self._arrives_ns:
            self._bring(block)

    def take(self, block: int) -> None:
        if block in self._arrives_ns:
            self.wait(self._arrives_ns[block], "stall_ns")

    def died(self, block: int) -> None:
        here = block in self._arrives_ns or block not in self._away
        in_flight = any(copy.block == block for copy in self._copies)
        if here and not in_flight:
            self.live_bytes -= self.record.blocks[block].nbytes

    def _bring(self, block: int) -> None:
        nbytes = self.record.blocks[block].nbytes
        start_ns = max(self.now_ns, self._in_free_ns, self._copied_ns[block])
        self._in_free_ns = start_ns + self._latency_ns + nbytes * self._in_ns
        self._arrives_ns[block] = self._in_free_ns
        self.hold(nbytes)

    def _poll(self, touch: Touch) -> None:
        self._host_ns = float(touch.host_ns)
        self._settle_done()

    def _settle_done(self) -> None:
        while self._copies and self._copies[0].end_ns <= self._host_ns:
            self._settle_oldest()

    def _settle_oldest(self) -> None:
        block = self._copies.popleft().block
        self._window_bytes -= self.record.blocks[block].nbytes
        self._away.add(block)
        if not self.record.blocks[block].held:
            self.live_bytes -= self.record.blocks[block].nbytes
