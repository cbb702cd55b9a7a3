"""pack and unpack: the only code that autograd calls.

[Note: passing a tensor through] What stays where it is is handed to autograd as ``(alias,
version)``. The alias is detached: the tensor itself would close a cycle through C++ that Python's
collector cannot see whenever an operation saves its own output. The version restores the in-place
check, which torch gives up when hooks are on. A parameter is no output, and is handed on itself:
an alias would hold the memory of one that is given other ``data`` meanwhile.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.utils.checkpoint

from offload.blocks.block import Block
from offload.blocks.placement import Placement, Policy, SavedTensor, next_tier, offload_all
from offload.blocks.registry import key_of
from offload.blocks.tickets import Ticket
from offload.config import Config
from offload.hooks.bundles import MEMBERS, Bundles
from offload.hooks.dtensor import Wrapper, part_of
from offload.hooks.kinds import (
    has_plain_bytes,
    is_cast_of_parameter,
    is_never_moved,
    is_part_of_data,
)
from offload.hooks.prefetch import Prefetcher
from offload.report import Counters
from offload.report.scopes import Scopes
from offload.tensors.layout import TensorLayout
from offload.tensors.live import HookPair, is_parameter_like
from offload.tensors.weak import VersionWitness, modified_in_place
from offload.tiers import Kept, Tiers

_graph_task_id = torch._C._current_graph_task_id
_next_node = torch._C._autograd._get_sequence_nr
Watch = Callable[[torch.Tensor, torch.UntypedStorage], None]


class Passed:
    """A tensor that was handed on to the pair of hooks that was active before ours."""

    __slots__ = ("packed", "unpack")

    def __init__(self, pair: HookPair, tensor: torch.Tensor) -> None:
        self.packed = pair[0](tensor)
        self.unpack = pair[1]


class _Part:
    """The first storages that fit into so many bytes, and which storages were asked about."""

    __slots__ = ("fits", "left_bytes")

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes
        self.fits: dict[int, bool] = {}  # by address

    def ask(self, address: int, nbytes: int) -> None:
        """Whether a storage that is new fits."""
        self.fits[address] = fits = nbytes <= self.left_bytes
        if fits:
            self.left_bytes -= nbytes


class _Asked(threading.local):
    """What a thread asks of what it saves, while it runs some part of a model."""

    placement: Placement | None = None  # in place of the policy's
    segment: int = -1  # of a plan, whose forward runs
    part: "_Part | None" = None  # of that goes to the placement; the rest stays
    node: int | None = None  # in place of the number of the operation that saves


class Hooks:
    """The pair of hooks of one session, and the blocks that are alive."""

    def __init__(self, config: Config, policy: Policy, tiers: Tiers) -> None:
        self._tiers = tiers
        self._prefetcher = Prefetcher(tiers)
        self.policy = policy
        self._device = config.device
        self._managed: dict[torch.device, bool] = {}  # of those seen
        self._min_bytes = max(1, config.min_offload_bytes)
        self._counters = Counters()
        self._asked = _Asked()
        self.scopes = Scopes(tiers.trace)
        self._in_backward = False  # where the step has come to, as far as it was seen
        self.watch: Watch | None = None  # sees what is saved, parameters apart
        self.held: frozenset[int] = frozenset()  # storages that stay, as their owner keeps them
        self._blocks = tiers.blocks
        self._bundles = Bundles(config, tiers, self._blocks, self._prefetcher, self.scopes)
        self._bundled_below = self._bundles.bundle_bytes // MEMBERS

    def begin_step(self, counters: Counters) -> None:
        """Count into ``counters`` from now on."""
        with self._tiers.lock:
            self._counters = counters
            for block in self._blocks.living():
                block.forget_dead()
            self._tiers.begin_step(counters)
            self._prefetcher.begin_step()
            self._bundles.begin_step(counters)
            self._in_backward = False
            self.scopes.forget()

    @property
    def live_blocks(self) -> int:
        """Blocks that some graph still holds."""
        return len(self._blocks)

    def when_done(self, then: Callable[[], None]) -> None:
        """Call ``then`` when no graph holds a block any more, as ``Registry.when_empty`` does."""
        self._blocks.when_empty(then)

    def wait_for_autograd(self) -> None:
        """On an accelerator a thread of autograd's runs backward, and lets go of its last graph
        a moment after backward has returned.
        """
        patient_until = time.monotonic() + 0.05
        while self._device.type != "cpu" and self._blocks and time.monotonic() < patient_until:
            time.sleep(0.001)

    def place(self, placement: Placement | None, segment: int = -1) -> None:
        """From now on as inside of ``placed``, until that is said again."""
        self._asked.placement, self._asked.segment = placement, segment

    @contextlib.contextmanager
    def placed(
        self, placement: Placement | None, segment: int = -1, limit_bytes: int | None = None
    ) -> Iterator[None]:
        """What this thread saves inside goes to ``placement``; ``None``: where the policy says.

        The innermost counts. What never moves, and what is too small to, stays as ever.

        Args:
            placement: where to.
            segment: the number of the plan's segment that it belongs to.
            limit_bytes: only what fits into so many bytes goes there, and the rest stays.
        """
        asked = self._asked
        before = asked.placement, asked.segment, asked.part
        asked.placement = placement
        asked.part = _Part(limit_bytes) if limit_bytes is not None else None
        asked.segment = segment if segment >= 0 else before[1]
        try:
            yield
        finally:
            asked.placement, asked.segment, asked.part = before

    @contextlib.contextmanager
    def numbered(self, node: int) -> Iterator[None]:
        """What this thread saves inside is wanted when backward reaches the operation ``node``."""
        before = self._asked.node
        self._asked.node = node
        try:
            yield
        finally:
            self._asked.node = before

    def foresee(self) -> None:
        """Start bringing back what backward will ask for next, as far as that is known and there is
        room.
        """
        with self._tiers.lock:
            if not self._tiers.in_child:
                self._prefetcher.foresee()

    def recall(self, packed: Iterable[object]) -> None:
        """Start bringing back what ``pack`` made these of, in this order, as far as there is room:
        all of it is about to be unpacked.
        """
        with self._tiers.lock:
            if self._tiers.in_child:
                return
            for ticket in packed:
                if isinstance(ticket, Wrapper):
                    ticket = ticket.packed
                if isinstance(ticket, Ticket) and not self._tiers.prefetch(ticket.block):
                    return

    def pair(self, outer: HookPair | None) -> HookPair:
        """``pack`` and ``unpack`` for one entry of a step.

        What we do not take goes to ``outer``, the pair before us. Inside a checkpointed function it
        stays instead: the step takes the place of the recomputation there, and checkpoint's own
        pair counts what it is given. It must be given nothing rather than a part.
        """
        if is_of_checkpoint(outer):
            outer = None

        def pack(tensor: torch.Tensor) -> object:
            taken = self._pack(tensor)
            if taken is not None and not (outer and type(taken) is Kept):
                return taken
            if outer:
                return Passed(outer, tensor)
            is_parameter = type(tensor) is torch.nn.Parameter
            return tensor if is_parameter else tensor.detach(), tensor._version

        return pack, self.unpack

    def _pack(self, tensor: torch.Tensor) -> object:
        """A ticket for a tensor that leaves, ``None`` for one that stays. Never raises for I/O. The
        cheapest test comes first: most saved tensors are small.
        """
        try:
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse and other kinds without a storage
            return self._count_kept("kind", 0)
        if self.watch is not None and not is_never_moved(tensor, nbytes):
            self.watch(tensor, storage)
        if nbytes < self._min_bytes:
            self._counters.kept_bytes["small"] += nbytes
            return None
        if is_parameter_like(tensor) or is_cast_of_parameter(tensor):
            return self._count_kept("parameter", nbytes)
        if tensor._base is not None and is_part_of_data(tensor, nbytes):
            return self._count_kept("view", nbytes)
        if not self._is_managed(tensor.device) or not has_plain_bytes(tensor, storage):
            return self._pack_part(tensor, nbytes)
        placement = self._placement(tensor, storage, nbytes)
        in_backward = _graph_task_id() != -1
        evicts = in_backward and self._tiers.may_evict
        if placement is Placement.KEEP or evicts:
            self._tiers.saw(tensor.device)
            self._tiers.gate.strict |= evicts  # no plan knows of a backward that saves
            self._tiers.count(storage)
            self._count_kept("backward" if evicts else "policy", nbytes)
            return self._tiers.keep(tensor, storage)
        if self._tiers.in_child:
            return self._count_kept("fork", nbytes)
        if in_backward:
            # Saved inside a backward, by a recomputed region or for a double backward: wanted
            # again at once. It is ours all the same: what checkpoint's own hooks see must not
            # differ from what its forward saw.
            self._count_kept("backward", nbytes)
            return tensor.detach(), tensor._version
        return self._take(tensor, storage, nbytes, placement)

    def _pack_part(self, tensor: torch.Tensor, nbytes: int) -> object:
        """The same for a tensor without plain bytes of its own, which may have some within."""
        part = part_of(tensor) if self._is_managed(tensor.device) else None
        if part is None:
            return self._count_kept("kind", nbytes)
        packed = self._pack(part)
        return Wrapper(tensor, packed) if type(packed) is Ticket else None

    def _placement(
        self, tensor: torch.Tensor, storage: torch.UntypedStorage, nbytes: int
    ) -> Placement:
        """What the rule in force says, else the policy; but nothing stays beyond the budget."""
        placement = self._asked.placement
        if placement is None:
            placement = self._by_policy(tensor, nbytes)
        if storage._cdata in self.held:
            return Placement.KEEP
        part = self._asked.part
        if part is not None and placement is not Placement.KEEP:
            known = self._blocks.find(key_of(tensor, storage, nbytes)[0]) is not None
            placement = self._partly(part, placement, storage, known)
        if placement is Placement.HOST and tensor.is_cpu:
            placement = Placement.KEEP
        if placement is Placement.KEEP and not self._may_keep(storage, nbytes):
            return next_tier(tensor.is_cpu)
        return placement

    def _by_policy(self, tensor: torch.Tensor, nbytes: int) -> Placement:
        if self.policy is offload_all:  # needs no description of the tensor
            return next_tier(tensor.is_cpu)
        described = SavedTensor(nbytes, tensor.dtype, tuple(tensor.size()), tensor.device)
        placement = self.policy(described)
        if not isinstance(placement, Placement):
            raise TypeError(f"the policy returned {placement!r}; return a Placement")
        return placement

    def _partly(
        self, part: _Part, placement: Placement, storage: torch.UntypedStorage, known: bool
    ) -> Placement:
        """``placement`` as long as there are bytes left for it; one storage has one place, whether
        others have saved it before or not.
        """
        address = storage._cdata
        if address not in part.fits or not (known or self._tiers.live.counts(storage)):
            part.ask(address, storage.nbytes())
        return placement if part.fits[address] else Placement.KEEP

    def _may_keep(self, storage: torch.UntypedStorage, nbytes: int) -> bool:
        """Within the budget of device memory, which counts what is there and was not counted."""
        gate, tiers = self._tiers.gate, self._tiers
        if gate.limit_bytes is None or _graph_task_id() != -1:
            return True
        with tiers.lock:
            new = tiers.common.lane.host_is_device and not tiers.live.counts(storage)
            leaving_bytes = tiers.outbound.leaving_bytes
            return gate.may_keep(self._asked.segment, nbytes if new else 0, leaving_bytes)

    def _count_kept(self, reason: str, nbytes: int) -> object:
        self._counters.kept_bytes[reason] += nbytes
        return None

    def _is_managed(self, device: torch.device) -> bool:
        managed = self._managed.get(device)
        if managed is None:
            ours = self._device
            managed = device.type == ours.type and ours.index in (None, device.index)
            self._managed[device] = managed
        return managed

    def _take(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        nbytes: int,
        placement: Placement,
    ) -> Ticket:
        witness, layout = VersionWitness(tensor), TensorLayout.of(tensor)
        asked, foreign = self._asked, tensor.grad_fn is None
        # The operation that saves is being built, and has taken its number already: the last one.
        node = asked.node if asked.node is not None else _next_node() - 1
        with self._tiers.lock:
            if self._in_backward:
                self._come_to("forward")
            key, base = key_of(tensor, storage, nbytes)
            if nbytes < self._bundled_below and self._tiers.gate.is_open:
                member = self._bundles.member(key, base, storage, placement, foreign, node)
                return Ticket(member.bundle.block, layout, witness, member)
            known = self._blocks.find(key)
            if known is not None:
                ticket = Ticket(known, layout, witness)
                self._counters.deduplicated_bytes += known.nbytes
            else:
                block = Block(storage, witness, placement, self.scopes.module)
                block.segment = asked.segment
                block.foreign = foreign
                ticket = Ticket(block, layout, witness)
                self._blocks.add(key, block, base)
                self._counters.saved_bytes += block.nbytes
                self._tiers.admit(block, storage)
            self._prefetcher.saved(ticket, node)
        return ticket

    def _come_to(self, phase: str) -> None:
        self._in_backward = phase == "backward"
        self._tiers.mark(phase)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The saved tensor again. May be called on any thread, several times, or never."""
        if type(packed) is tuple:
            alias, version = packed
            if alias._version != version:
                raise modified_in_place(TensorLayout.of(alias), alias._version, version)
            return alias  # type: ignore[no-any-return]
        if type(packed) is Passed:
            return packed.unpack(packed.packed)
        if type(packed) is Wrapper:
            return packed.around(self.unpack(packed.packed))
        if type(packed) is Kept:
            alias = packed.alias
            if alias is not None:
                return self.unpack((alias, packed.version))
            packed = packed.ticket
        ticket: Ticket = packed
        ticket.witness.check(ticket.layout)
        with self._tiers.lock:
            if not self._in_backward:
                self._come_to("backward")
            member = ticket.member
            found = self._tiers.at_hand(ticket.block) if member is not None else None
            if found is None:
                found = self._tiers.demand(ticket.block)
                # While the demanded bytes are on their way:
                self._prefetcher.asked(ticket if member is None else member.bundle)
                if member is not None:
                    self._bundles.asked(member.bundle)
            storage = self._tiers.take(ticket, found)
            if member is not None:
                storage = member.storage(storage)
            if self.watch is not None:
                self._tiers.uncount(storage)
            return ticket.layout.view(storage, ticket.witness.counter)


def is_of_checkpoint(pair: HookPair | None) -> bool:
    """Whether these hooks are those of ``torch.utils.checkpoint``, in a forward or recomputing, or
    pass everything on to those (``hooks_below``).
    """
    return pair is not None and pair[0].__module__ == torch.utils.checkpoint.__name__
