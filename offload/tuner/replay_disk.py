"""The replay of the CPU: slots that the computing thread fills, and one disk behind them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from offload.engines import padded
from offload.engines.budget import LEAST_MOVING, has_room
from offload.probe import MachineProfile
from offload.tuner.record import StepRecord, Touch
from offload.tuner.replay import Replay
from offload.tuner.setting import Setting

__all__ = ["Disk", "DiskReplay"]


@dataclass
class _Transfer:
    block: int
    left_bytes: float
    nbytes: int
    end_ns: float | None = None


class Disk:
    """One disk that serves reads before writes, each in order, at a rate of its own.

    Example:
        >>> disk = Disk(write_bytes_per_s=1e9, read_bytes_per_s=2e9)
        >>> write, read = disk.write(0, 100, at_ns=0), disk.read(1, 100, at_ns=50)
        >>> disk.end_of(write), disk.end_of(read)   # half of the write, the read, the other half
        (150.0, 100.0)
    """

    def __init__(self, *, write_bytes_per_s: float, read_bytes_per_s: float) -> None:
        self._write_ns, self._read_ns = 1e9 / write_bytes_per_s, 1e9 / read_bytes_per_s  # a byte
        self._now_ns = 0.0
        self._reads: deque[_Transfer] = deque()
        self.writes: deque[_Transfer] = deque()

    def write(self, block: int, nbytes: int, at_ns: float) -> _Transfer:
        """Queue a write."""
        self.advance(at_ns)
        self.writes.append(_Transfer(block, nbytes, nbytes))
        return self.writes[-1]

    def read(self, block: int, nbytes: int, at_ns: float, *, urgent: bool = False) -> _Transfer:
        """Queue a read; an urgent one goes before the others."""
        self.advance(at_ns)
        transfer = _Transfer(block, nbytes, nbytes)
        if urgent:
            self._reads.appendleft(transfer)
        else:
            self._reads.append(transfer)
        return transfer

    def promote(self, transfer: _Transfer) -> None:
        """Somebody waits for it."""
        if transfer.end_ns is None:
            self._reads.remove(transfer)
            self._reads.appendleft(transfer)

    def cancel(self, transfer: _Transfer) -> bool:
        """Take back a write; False if it has begun."""
        if transfer.end_ns is not None or transfer.left_bytes < transfer.nbytes:
            return False
        self.writes.remove(transfer)
        return True

    def advance(self, to_ns: float) -> None:
        """Let it work until then."""
        while self._now_ns < to_ns and (self._reads or self.writes):
            queue, byte_ns = (
                (self._reads, self._read_ns) if self._reads else (self.writes, self._write_ns)
            )
            first = queue[0]
            end_ns = self._now_ns + first.left_bytes * byte_ns
            if end_ns <= to_ns:
                queue.popleft()
                first.left_bytes, first.end_ns, self._now_ns = 0.0, end_ns, end_ns
            else:
                first.left_bytes -= (to_ns - self._now_ns) / byte_ns
                self._now_ns = to_ns
        self._now_ns = max(self._now_ns, to_ns)

    def end_of(self, transfer: _Transfer) -> float:
        """Let it work until ``transfer`` is done; returns when that is."""
        while transfer.end_ns is None:
            first = self._reads[0] if self._reads else self.writes[0]
            byte_ns = self._read_ns if self._reads else self._write_ns
            self.advance(self._now_ns + max(first.left_bytes * byte_ns, 1e-3))
        return transfer.end_ns


class DiskReplay(Replay):
    """Memory to disk and back. Bytes alive are saved storages and slots."""

    def __init__(
        self,
        record: StepRecord,
        setting: Setting,
        profile: MachineProfile,
        arena_bytes: int,
    ) -> None:
        super().__init__(record, setting, profile)
        rates = self.profile
        assert rates.disk_write_bytes_per_s and rates.disk_read_bytes_per_s
        self._disk = Disk(
            write_bytes_per_s=rates.disk_write_bytes_per_s,
            read_bytes_per_s=rates.disk_read_bytes_per_s,
        )
        self._copy_ns = 1e9 / rates.copy_bytes_per_s if rates.copy_bytes_per_s else 0.0
        self._arena_bytes = arena_bytes
        self._slots: dict[int, int] = {}  # padded bytes of those in use, by block
        self._slot_bytes = self._window_bytes = 0
        self._writing: deque[_Transfer] = deque()  # as far as the host has noticed
        self._by_block: dict[int, _Transfer] = {}  # newest transfer of a block
        self._on_disk: set[int] = set()
        self._served: set[int] = set()  # from a slot, which then stays

    def saved(self, touch: Touch) -> None:
        self._poll()

    def send_out(self, block: int) -> bool:
        nbytes = self.record.blocks[block].nbytes
        while not (self._fits_window(nbytes) and self._fits_arena(nbytes)):
            if not self._writing:
                return False
            self.wait(self._disk.end_of(self._writing[0]), "backpressure_ns")
            self._poll()
        self._take_slot(block)
        self.now_ns += nbytes * self._copy_ns
        self._window_bytes += nbytes
        write = self._disk.write(block, padded(nbytes), self.now_ns)
        self._writing.append(write)
        self._by_block[block] = write
        self.drop(block)
        return True

    def is_away(self, block: int) -> bool:
        return block in self._on_disk and block not in self._slots

    def prefetch(self, block: int) -> bool:
        nbytes = self.record.blocks[block].nbytes
        if not self._fits_arena(nbytes):
            return False
        self._take_slot(block)
        self._by_block[block] = self._disk.read(block, padded(nbytes), self.now_ns)
        return True

    def demand(self, touch: Touch) -> None:
        self._poll()
        block = touch.block
        if block not in self._on_disk or self.record.blocks[block].held:
            return
        if block in self._slots:
            self._disk.promote(self._by_block[block])
            return
        nbytes = self.record.blocks[block].nbytes
        while not self._fits_arena(nbytes) and self._writing:
            self.wait(self._disk.end_of(self._writing[0]), "backpressure_ns")
            self._poll()
        self._take_slot(block)  # outside the arena if need be
        self._by_block[block] = self._disk.read(block, padded(nbytes), self.now_ns, urgent=True)

    def take(self, block: int) -> None:
        self._served.add(block)
        if block in self._on_disk and block in self._slots:
            self.wait(self._disk.end_of(self._by_block[block]), "stall_ns")

    def died(self, block: int) -> None:
        write = self._by_block.get(block)
        if write is not None and block not in self._on_disk:
            if self._disk.cancel(write):
                self._writing.remove(write)
                self._window_bytes -= self.record.blocks[block].nbytes
                self._give_slot(block)
        elif block in self._slots:
            self._give_slot(block)
        elif write is None:
            self.live_bytes -= self.record.blocks[block].nbytes

    def _poll(self) -> None:
        self._disk.advance(self.now_ns)
        while self._writing and self._writing[0].end_ns is not None:
            block = self._writing.popleft().block
            self._window_bytes -= self.record.blocks[block].nbytes
            self._on_disk.add(block)
            if block not in self._served:
                self._give_slot(block)

    def _fits_window(self, nbytes: int) -> bool:
        return has_room(self._window_bytes, nbytes, self.setting.window_bytes, LEAST_MOVING)

    def _fits_arena(self, nbytes: int) -> bool:
        padded_bytes = padded(nbytes)
        if padded_bytes > self._arena_bytes:  # a mapping of its own, one at a time
            return all(used_bytes <= self._arena_bytes for used_bytes in self._slots.values())
        return self._slot_bytes + padded_bytes <= self._arena_bytes

    def _take_slot(self, block: int) -> None:
        self._slots[block] = padded(self.record.blocks[block].nbytes)
        self._slot_bytes += self._slots[block]
        self.hold(self._slots[block])

    def _give_slot(self, block: int) -> None:
        nbytes = self._slots.pop(block)
        self._slot_bytes -= nbytes
        self.live_bytes -= nbytes
