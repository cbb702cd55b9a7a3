"""Every state of a block against every method: the table in block.py, and nothing else."""

import errno
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch

from offload.blocks.block import Block, State
from offload.blocks.placement import Placement
from offload.blocks.tickets import Ticket
from offload.engines import Engine, Slot
from offload.engines.store import DiskStore
from offload.errors import ModifiedInPlaceError, StateError
from offload.lanes import CpuLane
from offload.tensors.layout import TensorLayout
from offload.tensors.weak import VersionWitness
from tests.conftest import wait_until
from tests.doubles import FailedRequest, FaultyEngine

NBYTES = 5000
# HOST stands for two: with the only copy in its slot, or read from the disk and there still.
STATES = ["LIVE", "OFFLOADING", "HOST", "SPILLING", "DISK", "FETCHING", "HOST_AND_DISK"]
METHODS = [
    "offload", "settle_offload", "spill", "settle_spill",
    "fetch", "settle_fetch", "reload", "release_slot",
]  # fmt: skip
MOVES = {
    ("LIVE", "offload"): State.OFFLOADING,
    ("OFFLOADING", "settle_offload"): State.HOST,
    ("HOST", "spill"): State.SPILLING,
    ("HOST", "reload"): State.HOST,
    ("HOST_AND_DISK", "spill"): State.SPILLING,
    ("HOST_AND_DISK", "reload"): State.HOST,
    ("HOST_AND_DISK", "release_slot"): State.DISK,
    ("SPILLING", "settle_spill"): State.DISK,
    ("SPILLING", "reload"): State.SPILLING,
    ("DISK", "fetch"): State.FETCHING,
    ("FETCHING", "settle_fetch"): State.HOST,
}
FIELDS = [
    "state", "slot", "extent", "request", "reservation", "checksum", "generation",
    "_device", "_device_ref", "_arrived", "copied",
]  # fmt: skip


class Rig:
    """One block and the parts it is moved by."""

    def __init__(self, engine: Engine, *, checksum: bool = False) -> None:
        self.engine = engine
        self.arena = engine.arena(1 << 20)
        self.lane = CpuLane(engine)
        self.store = DiskStore(engine, "/", None)
        self.checksum = checksum
        tensor = torch.arange(NBYTES, dtype=torch.int32).to(torch.uint8)
        self.expected = tensor.clone()
        self.layout = TensorLayout.of(tensor)
        self.witness = VersionWitness(tensor)
        self.block = Block(tensor.untyped_storage(), self.witness, Placement.DISK)
        self.ticket = Ticket(self.block, self.layout, self.witness)

    def slot(self) -> Slot:
        slot = self.arena.allocate(NBYTES)
        assert slot is not None
        return slot

    def call(self, method: str) -> Any:
        block = self.block
        calls: dict[str, Callable[[], Any]] = {
            "offload": lambda: block.offload(self.lane, self.slot(), checksum=self.checksum),
            "settle_offload": lambda: block.settle_offload(self.lane),
            "spill": lambda: block.spill(self.store, self.store.allocate(NBYTES)),
            "fetch": lambda: block.fetch(
                self.lane, self.store, self.slot(), urgent=True, reservation=None
            ),
            "reload": lambda: block.reload(self.lane),
        }
        return calls.get(method, getattr(block, method))()

    def serve(self, ticket: Ticket) -> None:
        storage = self.block.resident()
        assert storage is not None
        self.block.serve(self.lane, ticket, storage)

    def to(self, state: str) -> "Rig":
        walk = ["offload", "settle_offload", "spill", "settle_spill", "fetch", "settle_fetch"]
        for method in walk[: STATES.index(state)]:
            self.call(method)
        return self

    def bytes_now(self) -> torch.Tensor:
        storage = self.block.resident()
        assert storage is not None
        return self.layout.view(storage, torch.empty(0)).clone()


@pytest.fixture
def rig(real_engine: Engine) -> Iterator[Rig]:
    yield Rig(real_engine)
    real_engine.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("state", STATES)
def test_all_states_by_all_methods(rig: Rig, state: str, method: str) -> None:
    block = rig.to(state).block
    before = {name: getattr(block, name) for name in FIELDS}
    if (state, method) in MOVES:
        rig.call(method)
        assert block.state is MOVES[state, method]
        return
    with pytest.raises(StateError, match=f"block {block.id}"):
        rig.call(method)
    assert all(getattr(block, name) is before[name] for name in FIELDS), "something changed"


@pytest.mark.parametrize(
    ("state", "holds"),
    [
        # device, slot, extent, request
        ("LIVE", (True, False, False, False)),
        ("OFFLOADING", (True, True, False, False)),
        ("HOST", (False, True, False, False)),
        ("SPILLING", (False, True, True, True)),
        ("DISK", (False, False, True, False)),
        ("FETCHING", (False, True, True, True)),
        ("HOST_AND_DISK", (False, True, True, False)),
    ],
)
def test_what_each_state_holds(rig: Rig, state: str, holds: tuple[bool, ...]) -> None:
    block = rig.to(state).block
    held = (block._device, block.slot, block.extent, block.request)
    assert tuple(h is not None for h in held) == holds
    assert rig.store.used_bytes == (8192 if holds[2] else 0)
    if not holds[3]:  # a request holds its slot as well
        expected = 8192 if holds[1] else 0
        wait_until(lambda: rig.arena.used_bytes == expected)  # a thread lets go a moment later
        assert rig.arena.used_bytes == expected


@pytest.mark.parametrize("state", ["HOST", "SPILLING", "HOST_AND_DISK"])
def test_bytes_survive(rig: Rig, state: str) -> None:
    rig.to(state).call("reload")
    assert torch.equal(rig.bytes_now(), rig.expected)
    assert rig.block.generation == 1


def test_a_block_that_dies_gives_all_back(rig: Rig) -> None:
    rig.to("HOST_AND_DISK")
    del rig.block, rig.ticket
    wait_until(lambda: rig.arena.used_bytes == 0)
    assert (rig.arena.used_bytes, rig.store.used_bytes) == (0, 0)


def test_a_failed_write_keeps_the_slot(real_engine: Engine) -> None:
    faulty = FaultyEngine(real_engine)
    faulty.good_writes, faulty.code = 0, errno.ENOSPC
    rig = Rig(faulty).to("SPILLING")
    with pytest.raises(OSError, match="No space left"):
        rig.call("settle_spill")
    assert rig.block.state is State.HOST
    assert rig.block.extent is None
    assert rig.store.used_bytes == 0
    rig.call("reload")
    assert torch.equal(rig.bytes_now(), rig.expected)
    real_engine.close()


def test_a_failed_read_can_be_tried_again(real_engine: Engine) -> None:
    faulty = FaultyEngine(real_engine)
    faulty.good_reads = 0
    rig = Rig(faulty).to("FETCHING")
    with pytest.raises(OSError, match="Input/output"):
        rig.call("settle_fetch")
    assert rig.block.state is State.DISK
    assert rig.block.slot is rig.block.request is None
    faulty.good_reads = None
    rig.call("fetch")
    rig.call("settle_fetch")
    rig.call("reload")
    assert torch.equal(rig.bytes_now(), rig.expected)
    real_engine.close()


def test_a_reloaded_copy_goes_when_all_have_been_served(rig: Rig) -> None:
    rig.to("HOST_AND_DISK")
    second = Ticket(rig.block, rig.layout, rig.witness)
    rig.call("reload")
    rig.call("release_slot")
    rig.serve(rig.ticket)
    assert rig.block._device is not None, "the second ticket is still to come"
    rig.serve(second)
    assert rig.block._device is None
    assert rig.block.resident() is None
    wait_until(lambda: rig.arena.used_bytes == 0)
    assert rig.arena.used_bytes == 0


def test_a_dead_ticket_is_not_waited_for(rig: Rig) -> None:
    rig.to("HOST_AND_DISK")
    second = Ticket(rig.block, rig.layout, rig.witness)
    rig.call("reload")
    rig.call("release_slot")
    del second
    rig.serve(rig.ticket)
    assert rig.block._device is None


def test_dead_tickets_do_not_pile_up(rig: Rig) -> None:
    """One graph may keep a tensor that every step saves again."""
    for _ in range(1000):
        Ticket(rig.block, rig.layout, rig.witness)
    assert len(rig.block.tickets) < 100
    rig.to("HOST_AND_DISK").call("reload")
    assert len(rig.block.tickets) == 1


def test_serving_costs_the_same_among_many_tickets(rig: Rig) -> None:
    """The slices of one tensor, one for each step of time."""
    rig.to("HOST_AND_DISK")

    def lines_to_serve(count: int) -> int:
        tickets = [Ticket(rig.block, rig.layout, rig.witness) for _ in range(count)]
        rig.call("reload")
        held = [rig.block.resident()]
        run = 0

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal run
            run += frame.f_code.co_filename.endswith("block.py") and event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            rig.serve(rig.ticket)
            while tickets:
                rig.serve(tickets.pop())
        finally:
            sys.settrace(before)
        assert rig.block._device is None
        del held
        return run

    assert lines_to_serve(400) < 5 * lines_to_serve(100)


def test_a_copy_that_somebody_holds_is_found_again(rig: Rig) -> None:
    rig.to("HOST_AND_DISK").call("reload")
    rig.call("release_slot")
    held = rig.block.resident()
    rig.serve(rig.ticket)
    found = rig.block.resident()
    assert held is not None
    assert found is not None
    assert found._cdata == held._cdata
    assert rig.block.generation == 1


def test_witness_of_a_version() -> None:
    tensor = torch.zeros(4)
    witness = VersionWitness(tensor)
    layout = TensorLayout.of(tensor)
    witness.check(layout)
    tensor.detach()[1:].add_(1)
    assert witness.modified
    with pytest.raises(ModifiedInPlaceError, match=r"float32\[4\].*version 1; expected version 0"):
        witness.check(layout)


def test_witness_holds_no_memory() -> None:
    import weakref

    tensor = torch.zeros(1 << 10)
    witness = VersionWitness(tensor)
    storage = weakref.ref(tensor.untyped_storage())
    del tensor
    assert storage() is None
    assert not witness.modified


def test_failed_request_is_a_request() -> None:
    request = FailedRequest(errno.EIO)
    assert request.done()
    assert not request.cancel()
