"""Ticket: a saved tensor's claim on a block. Bundle, Member: what shares a block with others."""

import torch

from offload.blocks.block import Block
from offload.report.trace import Subject
from offload.tensors.layout import TensorLayout
from offload.tensors.weak import StorageRef, VersionWitness

_part = vars(torch._C.StorageBase)["__getitem__"]  # UntypedStorage's own adds a frame of Python


class Ticket:
    """What autograd holds in place of a saved tensor: how it views a block, and a claim on that
    block.
    """

    __slots__ = ("__weakref__", "block", "layout", "member", "ordinal", "served", "tape", "witness")

    def __init__(
        self,
        block: Block,
        layout: TensorLayout,
        witness: VersionWitness,
        member: "Member | None" = None,
    ) -> None:
        self.block = block
        self.layout = layout
        self.witness = witness
        self.member = member  # of the block, if that is a bundle
        self.served = 0  # the block's generation that this ticket was last served from
        self.tape: object = None  # the forward it belongs to and its place there: the prefetcher's
        self.ordinal = 0
        block.claim(self)

    def asks(self) -> Subject:
        """The block, the operator of backward that asks for it now, and the tensor it wants."""
        node = torch._C._current_autograd_node()
        operator = node.name() if node is not None else ""
        return self.block.subject._replace(operator=operator, tensor=self.layout)


class Bundle:
    """Several storages in one block (``offload.hooks.bundles``); its members hold it."""

    __slots__ = ("__weakref__", "block", "end", "member_bytes", "node", "ordinal", "tape", "where")

    def __init__(self, block: Block, where: object) -> None:
        self.block = block
        self.where = where  # its members are to wait, and what they come from
        self.end = 0  # bytes in use
        self.member_bytes = 0  # that this step counts as kept
        self.node = 0  # the number of the operation that saved the newest member
        self.tape: object = None  # as a ticket's, which it stands for
        self.ordinal = 0


class Member:
    """A storage in a bundle."""

    __slots__ = ("__weakref__", "_origin", "begin", "bundle", "nbytes")

    def __init__(self, bundle: Bundle, begin: int, storage: torch.UntypedStorage) -> None:
        self.bundle = bundle
        self.begin = begin  # bytes from the bundle's first
        self.nbytes = storage.nbytes()
        self._origin = StorageRef(storage)  # held, and asked first, for the reasons of a block's

    def storage(self, bundle: torch.UntypedStorage) -> torch.UntypedStorage:
        """The original if it is alive still, else its bytes in ``bundle``. That is a storage of its
        own, which begins and ends where the original did, as backward may go by that.
        """
        origin = self._origin.storage()
        if origin is not None and origin.nbytes() == self.nbytes:
            return origin
        part: torch.UntypedStorage = _part(bundle, slice(self.begin, self.begin + self.nbytes))
        return part
