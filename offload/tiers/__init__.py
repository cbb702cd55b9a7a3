"""Tiers: moves blocks between device, host memory and disk within the budgets.

    outbound.py   device -> host -> disk: the tail, the window, what rests and what is spilled
    inbound.py    disk -> host -> device: on demand, or ahead within the prefetch window
    host.py       the memory in between
    gate.py       the budget of device memory
    kept.py       what a plan keeps, and what of it leaves after all
    disk.py       reads and writes in flight
    allocator.py  the peak of the device's memory
    common.py     what they share

Tiers decide when a block moves; the block knows how.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable

import torch

from offload.blocks.block import Block, State
from offload.blocks.registry import Registry
from offload.config import Config
from offload.engines import Engine, open_engine
from offload.errors import StateError, StorageError
from offload.lanes import Lane, cpus_near, on_cpus, open_lane, pinner_for
from offload.report import Counters
from offload.report.trace import Trace
from offload.system import forks, pool
from offload.tensors.live import LiveBytes
from offload.tiers.allocator import AllocatorPeak
from offload.tiers.common import Common
from offload.tiers.disk import DiskTier
from offload.tiers.gate import Gate
from offload.tiers.host import HostTier
from offload.tiers.inbound import Inbound
from offload.tiers.kept import Keeping, Kept
from offload.tiers.outbound import Outbound

__all__ = ["Kept", "Tiers"]


class Tiers:
    """Device, host and disk for the blocks of one session. Every call is made under ``lock``."""

    def __init__(
        self,
        config: Config,
        engine: Engine | None = None,
        lane: Callable[[Engine], Lane] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self._generation = forks.generation
        self._config = config
        if config.device.type == "cpu":
            pool.use_pool(config.allocator)
        if engine is None:
            with on_cpus(cpus_near(config.device)):  # its threads stay on the processors of now
                engine = open_engine(config)
        kind = config.device.type
        host = HostTier(engine, config.arena_bytes, pinner_for(kind))
        opened = lane(engine) if lane is not None else open_lane(kind, engine)
        self.common = Common(config, engine, opened, host)
        self._allocator = AllocatorPeak(config.device)
        self.disk = DiskTier(self.common)
        self.blocks: Registry[Block] = Registry()  # that some graph still holds
        self.outbound = Outbound(
            self.common, self.disk, Keeping(self.common, self.disk, self.blocks)
        )
        self.inbound = Inbound(self.common, self.disk, self.outbound)
        # As they are: a frame of our own around each would be one more per saved tensor.
        self.prefetch, self.take = self.inbound.prefetch, self.inbound.take
        weakref.finalize(self, _let_go, self._generation, self.common.lane, host).atexit = False

    @property
    def host(self) -> HostTier:
        """Host memory."""
        return self.common.host

    @property
    def gate(self) -> Gate:
        """The budget of device memory."""
        return self.common.gate

    @property
    def live(self) -> LiveBytes:
        """The saved storages on the device."""
        return self.common.live

    @property
    def trace(self) -> Trace:
        """What happened lately."""
        return self.common.trace

    @property
    def error(self) -> StorageError | None:
        """This step's first failure of the disk."""
        return self.common.error

    @property
    def failure(self) -> str:
        """The same, as the report of the newest step warns of it; empty if there was none. A write
        may fail when its step is over: in the optimizer, or while the session closes.
        """
        return next(iter(self.common.counters.warnings)) if self.error is not None else ""

    @property
    def in_child(self) -> bool:
        """Whether this process was forked from the one that opened the tiers.

        Its memory holds neither the parent's slots nor its threads, and the file is the parent's.
        """
        return self._generation != forks.generation

    def begin_step(self, counters: Counters) -> None:
        """Count into ``counters`` from now on, and try the disk again if it had failed."""
        self.common.counters = counters
        self.common.error = None
        if self.in_child:
            return
        self.outbound.forget_dead()
        self.disk.store.peak_bytes = self.disk.store.used_bytes
        self.inbound.drop_guesses()
        pool.begin_step()
        counters.peak_device_bytes = self._allocator.begin()
        self.common.mark("begin")

    def mark(self, moment: str) -> None:
        """The computation has come to ``moment`` (one of ``trace.MOMENTS``) of a step."""
        if not self.in_child:
            counters = self.common.counters
            counters.peak_device_bytes = max(counters.peak_device_bytes, self._allocator.look())
            self.common.mark(moment)

    def end_step(self) -> None:
        """Send the tail out too, as no backward is about to ask for it; note what has completed.

        Where failures are to be raised, everything in flight is seen out: a step raises its own.
        """
        if self.in_child:
            return
        self.mark("end")
        self.outbound.shrink_tail(0)
        self.outbound.poll()
        # The next forward needs its window; what backward needed besides would only add to the
        # process where the forward's own memory peaks.
        self.host.trim(self._config.window_bytes)
        if self._config.on_error == "raise":
            self.disk.settle_all(self.disk.writes)

    def drain(self) -> None:
        """Finish what is in flight."""
        self.outbound.settle_all()
        self.common.lane.drain()
        self.disk.settle_all(self.disk.writes)
        self.disk.settle_all(self.disk.reads)

    def close(self) -> None:
        """Finish what is in flight, and let go of threads, memory and file: the session is closed
        and has no block any more. The garbage collector may come here, on any thread.
        """
        if self.in_child:
            return
        with self.lock:
            with contextlib.suppress(RuntimeError):  # of the device; whoever uses it next is told
                self.drain()
            self.host.close()
            self.common.engine.close()
            pool.begin_step()  # twice: what the last steps needed is needed no more
            pool.begin_step()

    def saw(self, device: torch.device) -> None:
        """Note the stream that saves something which stays."""
        self.common.lane.saw(device)

    def admit(self, block: Block, storage: torch.UntypedStorage) -> None:
        """Take on a new block: it starts to leave when its turn comes."""
        if self.common.lane.host_is_device:
            block.window_bytes = block.padded_bytes
        self.inbound.use(block)
        self.outbound.admit(block, storage)

    def make_room(self, nbytes: int) -> None:
        """Wait until so many more bytes fit into the budget of device memory, or nothing leaves any
        more.
        """
        if self.in_child:
            return
        if self.gate.strict and not self.gate.has_room(nbytes):
            self.inbound.drop_guesses()  # by a plan that is wrong
        self.outbound.make_room(nbytes)

    @property
    def may_evict(self) -> bool:
        """Whether what stays may have to leave: a plan is in force, and may be wrong."""
        return self.gate.planned and self.common.lane.host_is_device and not self.in_child

    def keep(self, tensor: torch.Tensor, storage: torch.UntypedStorage) -> Kept | None:
        """A saved tensor that stays as long as there is room; ``None``: in any case."""
        if not self.may_evict:
            return None
        with self.lock:
            return self.outbound.keeping.add(tensor, storage)

    def count(self, storage: torch.UntypedStorage) -> None:
        """``storage`` is saved and stays."""
        if self.in_child:
            return
        with self.lock:
            if self.common.live.track(storage):
                self.outbound.poll()  # slots of what has been written, originals that were copied
                if self.gate.limit_bytes is not None:
                    self.outbound.make_room_for_next(storage.nbytes())
            self.common.sample()

    def uncount(self, storage: torch.UntypedStorage) -> None:
        """``storage`` may be the memory of a slot, which counts already."""
        if self.common.lane.host_is_device:
            self.common.live.exclude(storage, unless_counted=True)

    def leaving_bytes(self, segment: int) -> int:
        """Of the blocks of ``segment``, what is in memory: on its way out, or back early."""
        early = sum(nbytes for owner, nbytes in self.inbound.early() if owner == segment)
        return early + self.outbound.waiting_bytes(segment)

    def poll(self) -> None:
        """Take note of what has completed. Never waits."""
        self.outbound.poll()

    def at_hand(self, block: Block) -> torch.UntypedStorage | None:
        """Its device storage if backward asked for it last, and it is still there."""
        return self.inbound.at_hand(block) if self._generation == forks.generation else None

    def demand(self, block: Block) -> torch.UntypedStorage | None:
        """Backward wants ``block`` now: start bringing it if it is not there or on its way.

        Returns:
            The device storage if it has one, perhaps still on its way: for ``take``.

        Raises:
            StateError: this is a forked child, and the bytes are in the parent's hands.
        """
        if self._generation == forks.generation:  # not in_child
            self.outbound.poll()
            return self.inbound.demand(block)
        if block.state is not State.LIVE or block.slot is not None:
            raise StateError(
                "this process was forked between the forward and its backward: the activations are "
                "the parent's; run forward and backward in one process"
            )
        return block.resident()


def _let_go(born: int, lane: Lane, host: HostTier) -> None:
    """The last of a session and its graphs is about to die, perhaps unclosed: see its copies out
    before their memory goes.
    """
    if forks.generation == born:
        with contextlib.suppress(RuntimeError):  # of the device; whoever uses it next is told
            lane.drain()
        host.close()
