"""Bundles: small storages leave and come back together, as one block.

A transfer costs the thread that trains as much for 16 KiB as for 2 MiB. So a small storage is
copied into a bundle as it is saved; a bundle is a block like any other, and the tickets of its
members are tickets for it. It leaves when it is full. One that does not get that far is worth no
transfer, and stays.

[Note: one bundle, one stream] What is full leaves behind the stream that is current then. So there
is a bundle for each stream, and who finds it full sends it out.

[Note: what backward leaves behind] The members of a bundle need not be of one graph, and some may
never be asked for. A reloaded bundle that waited for all of them would fill the memory again. So
backward has the few that it came to last; an earlier one goes, and comes once more if need be.
"""

import weakref

import torch

from offload.blocks.block import Block
from offload.blocks.placement import Placement
from offload.blocks.registry import Base, Key, Registry
from offload.blocks.tickets import Bundle, Member
from offload.config import Config
from offload.hooks.prefetch import Prefetcher
from offload.lanes import DONE
from offload.report import Counters
from offload.report.scopes import Scopes
from offload.tensors.weak import VersionWitness
from offload.tiers import Tiers

_ALIGNED_BYTES = 64  # where a member begins: a multiple of every element, and of a cache line
MEMBERS = 16  # that fit into a bundle at least: what is larger moves by itself
_AT_HAND = 4  # that backward may work on at one time


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
        self._filling: list[weakref.ref[Bundle]] = []
        self._at_hand: list[weakref.ref[Bundle]] = []  # the newest last

    def begin_step(self, counters: Counters) -> None:
        """Count into ``counters`` from now on. What is not full goes on being filled."""
        self._counters = counters
        for bundle in (r() for r in self._filling):
            if bundle is not None:
                bundle.member_bytes = 0  # the step before has counted them

    def member(
        self,
        key: Key,
        base: Base,
        storage: torch.UntypedStorage,
        placement: Placement,
        foreign: bool,
        node: int,
    ) -> Member:
        """The place of ``storage`` in a bundle, which it may have already.

        Args:
            key: of the storage.
            base: is held together with the key.
            storage: is copied, as it is now.
            placement: where it is to wait.
            foreign: made by no operation of the graph.
            node: the number of the operation that saves it.
        """
        nbytes, counters, device, stream_id = storage.nbytes(), self._counters, storage.device, 0
        if not self._lane.host_is_device:
            stream_id = torch.accelerator.current_stream(device).stream_id
        where = (placement, device, stream_id)
        member = self._members.find(key)
        # Else what another stream copies may not be there yet for this one.
        if member is not None and member.bundle.where == where:
            counters.deduplicated_bytes += nbytes
            return member
        bundle = self._room(nbytes, where) or self._opened(placement, device, where)
        begin, target = bundle.end, bundle.block.held
        assert target is not None
        bundle.end = begin + -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
        self._live.track(storage)
        self._lane.gather(storage, target, begin, foreign)
        member = Member(bundle, begin, storage)
        self._members.add(key, member, base)
        bundle.node = node
        bundle.member_bytes += nbytes
        counters.kept_bytes["bundle"] += nbytes  # for as long as it is not full
        return member

    def asked(self, bundle: Bundle) -> None:
        """Backward has come to ``bundle``. See Note: what backward leaves behind."""
        self._at_hand = [r for r in self._at_hand if r() not in (None, bundle)]
        self._at_hand.append(weakref.ref(bundle))
        if len(self._at_hand) > _AT_HAND:
            left = self._at_hand.pop(0)()
            if left is not None and left.block.reservation is None:  # it is not early again
                left.block.unload()

    def _room(self, nbytes: int, where: object) -> Bundle | None:
        """The bundle that has room for so many bytes. One that has not leaves."""
        for ref in tuple(self._filling):  # one, as a rule
            bundle = ref()
            if bundle is None:
                self._filling.remove(ref)
            elif bundle.where == where:
                if bundle.end + nbytes <= self.bundle_bytes:
                    return bundle
                self._filling.remove(ref)
                self._send(bundle)
        return None

    def _opened(self, placement: Placement, device: torch.device, where: object) -> Bundle:
        # Where the device's memory is host memory, the slot that it leaves by is filled at once.
        nbytes, host = self.bundle_bytes, self._tiers.common.host
        slot = host.slot(nbytes) if self._lane.host_is_device else None
        if slot is not None:
            storage, _ = self._lane.copy_in(slot, DONE, device)
        else:
            storage = torch.empty(nbytes, dtype=torch.uint8, device=device).untyped_storage()
            self._live.track(storage)
        witness = VersionWitness(torch.empty(0, dtype=torch.uint8, device=device))
        block = Block(storage, witness, placement, self._scopes.module)
        block.slot = slot
        self._blocks.add((storage._cdata, 0), block)
        self._tiers.common.sample()
        bundle = Bundle(block, where)
        self._filling.append(weakref.ref(bundle))
        return bundle

    def _send(self, bundle: Bundle) -> None:
        block = bundle.block
        storage = block.held
        assert storage is not None
        self._counters.kept_bytes["bundle"] -= bundle.member_bytes
        self._counters.saved_bytes += block.nbytes
        self._tiers.admit(block, storage)
        self._prefetcher.saved(bundle, bundle.node)
