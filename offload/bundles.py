"""Bundles: small storages leave and come back together, as one block.

A transfer costs the thread that trains as much for 16 KiB as for 2 MiB. So a small storage is
copied into a bundle as it is saved; a bundle is a block like any other, and the tickets of its
members are tickets for it. It leaves when it is full. One that does not get that far is worth no
transfer, and stays.

[Note: one bundle, one stream] What is full leaves behind the stream that is current then. So there
is a bundle for each stream, and who finds it full sends it out.
"""

import weakref

import torch

from offload.block import Block, Member
from offload.config import Config
from offload.placement import Placement
from offload.prefetch import Prefetcher
from offload.registry import Key, Registry
from offload.report import Counters
from offload.scopes import Scopes
from offload.tiers import Tiers
from offload.weak import VersionWitness

_ALIGNED_BYTES = 64  # where a member begins: a multiple of every element, and of a cache line
MEMBERS = 16  # that fit into a bundle at least: what is larger moves by itself


_Where = tuple[Placement, torch.device, int]  # where to, where from, and the stream's number


class _Bundle:
    """One that is being filled, for as long as anybody holds what is in it."""

    __slots__ = ("block", "end", "member_bytes", "node", "where")

    def __init__(self, block: Block, where: _Where) -> None:
        self.block = weakref.ref(block)
        self.where = where
        self.end = 0  # bytes in use
        self.member_bytes = 0
        self.node = 0  # the number of the operation that saved the newest member


class Bundles:
    """The bundles of one session. Every call is made under the tiers' lock.

    Args:
        config: says how large they are.
        tiers: what full ones are sent out to.
        blocks: where they are entered.
        prefetcher: told of each that leaves.
        scopes: tell the module that one belongs to: that of its first member.
    """

    def __init__(
        self,
        config: Config,
        tiers: Tiers,
        blocks: Registry[Block],
        prefetcher: Prefetcher,
        scopes: Scopes,
    ) -> None:
        self.bundle_bytes = config.bundled_bytes
        self._tiers = tiers
        self._live, self._lane = tiers.live, tiers.common.lane
        self._blocks = blocks
        self._prefetcher = prefetcher
        self._scopes = scopes
        self._counters = Counters()
        self._members: Registry[Member] = Registry()
        self._filling: list[_Bundle] = []

    def begin_step(self, counters: Counters) -> None:
        """Count into ``counters`` from now on. What was not filled is left to its tickets."""
        self._counters = counters
        self._filling.clear()

    def member(
        self,
        key: Key,
        storage: torch.UntypedStorage,
        placement: Placement,
        foreign: bool,
        node: int,
    ) -> Member:
        """The place of ``storage`` in a bundle, which it may have already.

        Args:
            key: of the storage.
            storage: is copied, as it is now.
            placement: where it is to wait.
            foreign: made by no operation of the graph.
            node: the number of the operation that saves it.
        """
        nbytes, counters = storage.nbytes(), self._counters
        member = self._members.find(key)
        if member is not None:
            counters.deduplicated_bytes += nbytes
            return member
        bundle, block = self._room(nbytes, placement, storage.device)
        begin, target = bundle.end, block.resident()
        assert target is not None
        self._live.track(storage)
        self._lane.gather(storage, target, begin, foreign)
        member = Member(block, begin, storage)
        self._members.add(key, member)
        bundle.node = node
        bundle.end = begin + -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        bundle.member_bytes += nbytes
        counters.kept_bytes["bundle"] += nbytes  # for as long as it is not full
        return member

    def _room(
        self, nbytes: int, placement: Placement, device: torch.device
    ) -> tuple[_Bundle, Block]:
        """The bundle that has room for so many bytes, and its block."""
        is_cpu = device.type == "cpu"
        stream_id = 0 if is_cpu else torch.accelerator.current_stream(device).stream_id
        where = (placement, device, stream_id)
        for bundle in self._filling:  # one, as a rule
            if bundle.where == where:
                block = bundle.block()
                if block is not None and bundle.end + nbytes <= self.bundle_bytes:
                    return bundle, block
                self._filling.remove(bundle)
                if block is not None:
                    self._send(bundle, block)
                break
        block = self._opened(placement, device)
        bundle = _Bundle(block, where)
        self._filling.append(bundle)
        return bundle, block

    def _opened(self, placement: Placement, device: torch.device) -> Block:
        """An empty bundle, where the device's memory is host memory in the slot it leaves from."""
        common = self._tiers.common
        slot = common.host.slot(self.bundle_bytes) if common.lane.host_is_device else None
        if slot is not None:
            filled = torch.empty(0, dtype=torch.uint8).set_(common.engine.alias(slot))
        else:
            filled = torch.empty(self.bundle_bytes, dtype=torch.uint8, device=device)
            self._live.track(filled.untyped_storage())
        storage = filled.untyped_storage()
        block = Block(storage, VersionWitness(filled), placement, self._scopes.module)
        block.slot = slot
        self._blocks.add((storage._cdata, 0), block)
        common.sample()
        return block

    def _send(self, bundle: _Bundle, block: Block) -> None:
        # Backward asks for the newest first. If none is alive, nobody will ask.
        newest = next((t for r in reversed(block.tickets) if (t := r()) is not None), None)
        storage = block.resident()
        if newest is not None and storage is not None:
            self._counters.kept_bytes["bundle"] -= bundle.member_bytes
            self._counters.saved_bytes += block.nbytes
            self._tiers.admit(block, storage)
            self._prefetcher.saved(newest, bundle.node)
