"""The lane of an accelerator: copies on two side streams, ordered by events.

Written against ``torch.accelerator``, ``torch.Stream`` and ``torch.Event`` only. The host never
waits for the device here, except where it is about to touch bytes itself (rule 7). Seven rules keep
this free of races; each is one method.

[Note: rule 1, copy-out waits for the producer]
    The stream that copies out waits for what the packing stream had queued when the tensor was
    saved: the operator that makes these bytes is among it. The copy may be queued much later, while
    another stream is current.

[Note: rule 2, the source outlives its copy]
    When a source is let go while its copy is still on its way, the producing stream first waits for
    the copy. The memory goes back to that stream's pool, and whatever the stream writes there next
    comes after the copy. The host does not wait, and unlike with ``record_stream`` the allocator
    can use the memory again at once. Where several streams compute, or where no operation of the
    graph made the tensor (a loader's stream may have), the memory may belong to another stream;
    there ``record_stream`` is called as well.

[Note: rule 3, copy-in waits for its bytes]
    A reload waits for the copy-out of the same block. What came from the disk was complete in host
    memory before the reload was queued.

[Note: rule 4, copy-in waits for its target]
    The target is allocated for the current stream and may be memory that this stream still uses
    for something else. The stream that copies in waits for what the current one has queued so far.

[Note: rule 5, the consumer waits for copy-in]
    The stream that is current where a saved tensor is unpacked (autograd sets it, on its own
    thread) waits for the reload. It does so for every consumer: there may be several.

[Note: rule 6, a slot is used again only after its copies]
    The lane holds every slot until an event has told the host that the copy which reads or writes
    it has completed; only then can it be handed out again.

[Note: rule 7, host code waits for copy-out]
    Before host code reads a slot (to write it to the disk), the copy-out must have completed, not
    merely been queued: here the host waits.
"""

from collections import defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from offload.engines import Engine, Slot
from offload.lanes.base import Fence, Passage
from offload.lanes.order import HOST, CheckedOrder, Mark, Order
from offload.report.trace import MOMENTS, NOTHING, Subject, now_ns
from offload.system.machine import indexed


class _Copy:
    """The fence of one copy."""

    __slots__ = ("_lane", "about", "mark", "stream", "target")

    def __init__(
        self,
        lane: "AcceleratorLane",
        mark: Mark,
        stream: torch.Stream,
        about: Subject,
        target: torch.Tensor | None = None,
    ) -> None:
        self._lane = lane
        self.about = about
        self.mark = mark
        self.stream = stream  # that computed the source, or that the target was allocated for
        self.target = target  # of a copy-in, until somebody uses it

    def done(self) -> bool:
        return self._lane.order.done(self.mark)

    def synchronize(self) -> None:
        self._lane.order.synchronize(self.mark)

    def __del__(self) -> None:
        # A graph may be dropped while a reload is on its way. Its target is then held until the
        # copy has completed; this may run in the garbage collector, so it only appends.
        if self.target is not None:
            self._lane.orphans.append((self.mark, self.target))


class _Produced(NamedTuple):
    """A point in a packing stream's work: by then a saved tensor was computed."""

    stream: torch.Stream
    mark: Mark


class _Side(NamedTuple):
    """The side streams of one device, and what their copies still use, oldest first."""

    out: torch.Stream
    into: torch.Stream
    origin: Mark  # where its times are counted from ...
    origin_ns: int  # ... and when that was, for the host
    held_out: "deque[tuple[Mark, Slot]]"
    held_in: "deque[tuple[Mark, Slot]]"


class _Watched(NamedTuple):
    """A copy, or a wait for one, that will have ended when both marks are passed."""

    name: str
    nbytes: int
    start: Mark
    end: Mark
    about: Subject


_DEFAULT_STREAM = 0  # its stream_id on every kind of device
_MAX_WATCHED = 1 << 14  # on their way at one time; the oldest are not told of


class AcceleratorLane:
    """Copies of one or several devices of one kind; every call is made under the tiers' lock.

    Args:
        engine: gives host tensors over its slots.
        order: events and waits, plain or checked.
    """

    host_is_device = False

    def __init__(self, engine: Engine, order: Order) -> None:
        self.order = order
        self.orphans: deque[tuple[Mark, torch.Tensor]] = deque()
        self._engine = engine
        self._checked = isinstance(order, CheckedOrder)
        self._sides: dict[torch.device, _Side] = {}
        # Streams that packed something, and the default one: others may pack what it allocated.
        self._computing = defaultdict[torch.device, set[int]](lambda: {_DEFAULT_STREAM})
        self._watched: deque[_Watched] = deque(maxlen=_MAX_WATCHED)
        self._clocked: set[torch.device] = set()  # whose origin has passed

    # -- out --------------------------------------------------------------------------------------

    def saw(self, device: torch.device) -> None:
        self._caller(device)

    def produced(self, storage: torch.UntypedStorage) -> object:
        source = _bytes_of(storage)
        producer = self._caller(storage.device)
        if self._several_compute(storage.device):
            self._hand_over(source)  # how the user's streams order each other is not seen here
        self._touches(producer, source, write=True, what="computing a saved tensor")
        return _Produced(producer, self.order.record(producer))

    def gather(
        self, source: torch.UntypedStorage, target: torch.UntypedStorage, begin: int, foreign: bool
    ) -> None:
        read = _bytes_of(source)
        current = self._caller(source.device)
        _bytes_of(target)[begin : begin + source.nbytes()].copy_(read)
        if foreign or self._several_compute(source.device):
            read.record_stream(current)  # its memory may belong to another stream
            self._leave_to_allocator(read)

    def copy_out(
        self,
        slot: Slot,
        storage: torch.UntypedStorage,
        produced: object,
        *,
        checksum: bool,
        about: Subject = NOTHING,
    ) -> tuple[Fence, int | None]:
        assert isinstance(produced, _Produced)
        source, side = _bytes_of(storage), self._side(storage.device)
        self._after_producer(side.out, produced)
        start = self._timed_mark(side.out)
        with side.out:
            self._host_tensor(slot).copy_(source, non_blocking=True)
        self._touches(side.out, source, write=False, what="copying it out")
        self._touches_slot(side.out, slot, write=True, what="copying out to a slot")
        copied = self._timed_mark(side.out)
        self._hold(side.held_out, copied, slot)
        self._watch("offload", slot.nbytes, start, copied, about)
        return _Copy(self, copied, produced.stream, about), None

    def let_go(
        self, storage: torch.UntypedStorage, copied: Fence, *, foreign: bool = False
    ) -> None:
        assert isinstance(copied, _Copy)
        source = _bytes_of(storage)
        if not copied.done():
            start = self._timed_mark(copied.stream)
            self._watch("backpressure", 0, start, copied.mark, copied.about)
            self._return_after(copied)
        self._touches(copied.stream, source, write=True, what="using its memory again")
        if foreign or self._several_compute(storage.device):
            source.record_stream(copied.stream)  # whose work before now may still read it
            self._leave_to_allocator(source)

    # -- back -------------------------------------------------------------------------------------

    def copy_in(
        self, slot: Slot, copied: Fence, device: torch.device, about: Subject = NOTHING
    ) -> tuple[torch.UntypedStorage, Fence]:
        side = self._side(device)
        current = torch.accelerator.current_stream(device)
        target = torch.empty(slot.nbytes, dtype=torch.uint8, device=device)
        self._touches(current, target, write=True, what="using the target's memory before")
        self._after_allocation(side.into, current)
        self._after_copy_out(side.into, copied)
        start = self._timed_mark(side.into)
        with side.into:
            target.copy_(self._host_tensor(slot), non_blocking=True)
        self._touches_slot(side.into, slot, write=False, what="copying in from a slot")
        self._touches(side.into, target, write=True, what="copying it in")
        arrived = self._timed_mark(side.into)
        self._hold(side.held_in, arrived, slot)
        self._watch("reload", slot.nbytes, start, arrived, about)
        return target.untyped_storage(), _Copy(self, arrived, current, about, target)

    def before_use(
        self, storage: torch.UntypedStorage, arrived: Fence, about: Callable[[], Subject] = Subject
    ) -> None:
        assert isinstance(arrived, _Copy)
        consumer = torch.accelerator.current_stream(storage.device)
        if not arrived.done():
            self._watch("stall", 0, self._timed_mark(consumer), arrived.mark, about())
            self._before_use(consumer, arrived)
        arrived.target = None
        target = _bytes_of(storage)
        self._touches(consumer, target, write=False, what="using a reloaded tensor")
        if consumer.stream_id != arrived.stream.stream_id:
            # It was allocated for another stream, to whose pool its memory will return.
            target.record_stream(consumer)
            self._hand_over(target)

    # -- host -------------------------------------------------------------------------------------

    def host_reads(self, slot: Slot, copied: Fence) -> None:
        self._before_host_reads(copied)
        self._touches_slot(HOST, slot, write=False, what="reading a slot on the host")

    def host_writes(self, slot: Slot) -> None:
        self._touches_slot(HOST, slot, write=True, what="writing a slot on the host")

    def mark(self, moment: str, device: torch.device) -> bool:
        device = indexed(device)
        self._side(device)  # its clock
        here = self._timed_mark(torch.accelerator.current_stream(device))
        self._watch(moment, 0, here, here, NOTHING)
        return True

    @property
    def in_flight(self) -> tuple[int, int]:
        sides = self._sides.values()
        return sum(len(s.held_out) for s in sides), sum(len(s.held_in) for s in sides)

    def poll(self) -> list[Passage]:
        self._let_go_of_slots()
        ended = []
        while self._watched and self._have_passed(self._watched[0]):
            ended.append(self._passage(self._watched.popleft()))
        return [p for p in ended if p.end_ns > p.start_ns or p.name in MOMENTS]

    def _let_go_of_slots(self) -> None:
        for side in self._sides.values():
            for held in (side.held_out, side.held_in):
                while held and self.order.done(held[0][0]):
                    held.popleft()
        for _ in range(len(self.orphans)):
            mark, target = self.orphans.popleft()
            if not self.order.done(mark):
                self.orphans.append((mark, target))

    def drain(self) -> None:
        for side in self._sides.values():
            for held in (side.held_out, side.held_in):
                if held:
                    self.order.synchronize(held[-1][0])
        self._let_go_of_slots()  # what has passed is told by the next poll

    # -- the rules --------------------------------------------------------------------------------

    def _after_producer(self, out: torch.Stream, produced: _Produced) -> None:
        """See [Note: rule 1, copy-out waits for the producer]."""
        self.order.wait(out, produced.mark)

    def _return_after(self, copied: _Copy) -> None:
        """See [Note: rule 2, the source outlives its copy]."""
        self.order.wait(copied.stream, copied.mark)

    def _several_compute(self, device: torch.device) -> bool:
        """Whether memory of the device may belong to a stream other than the one that packs it."""
        return len(self._computing[device]) > 1

    def _leave_to_allocator(self, source: torch.Tensor) -> None:
        """See [Note: rule 2, the source outlives its copy]."""
        source.record_stream(self._side(source.device).out)
        self._hand_over(source)

    def _after_copy_out(self, into: torch.Stream, copied: Fence) -> None:
        """See [Note: rule 3, copy-in waits for its bytes]."""
        if isinstance(copied, _Copy) and not copied.done():
            self.order.wait(into, copied.mark)

    def _after_allocation(self, into: torch.Stream, current: torch.Stream) -> None:
        """See [Note: rule 4, copy-in waits for its target]."""
        self.order.wait(into, self.order.record(current))

    def _before_use(self, consumer: torch.Stream, copy: _Copy) -> None:
        """See [Note: rule 5, the consumer waits for copy-in]."""
        self.order.wait(consumer, copy.mark)

    def _hold(self, held: "deque[tuple[Mark, Slot]]", mark: Mark, slot: Slot) -> None:
        """See [Note: rule 6, a slot is used again only after its copies]."""
        held.append((mark, slot))

    def _before_host_reads(self, copied: Fence) -> None:
        """See [Note: rule 7, host code waits for copy-out]."""
        if not copied.done():
            copied.synchronize()

    # -- what the report is told ------------------------------------------------------------------

    def _timed_mark(self, stream: torch.Stream) -> Mark:
        return self.order.record(stream, timed=True)

    def _watch(self, name: str, nbytes: int, start: Mark, end: Mark, about: Subject) -> None:
        self._watched.append(_Watched(name, nbytes, start, end, about))

    def _have_passed(self, watched: _Watched) -> bool:
        device = watched.end.event.device
        if device not in self._clocked:  # another stream may be ahead of the one with the origin
            if not self.order.done(self._sides[device].origin):
                return False
            self._clocked.add(device)
        return self.order.done(watched.end) and self.order.done(watched.start)

    def _passage(self, watched: _Watched) -> Passage:
        side = self._sides[watched.end.event.device]

        def when_ns(mark: Mark) -> int:
            return side.origin_ns + int(1e6 * side.origin.event.elapsed_time(mark.event))

        start_ns, end_ns = when_ns(watched.start), when_ns(watched.end)
        return Passage(watched.name, watched.nbytes, start_ns, end_ns, watched.about)

    # -- what the order is told --------------------------------------------------------------------

    def _touches(
        self, stream: torch.Stream, tensor: torch.Tensor, *, write: bool, what: str
    ) -> None:
        if self._checked:
            start, space = tensor.data_ptr(), str(tensor.device)
            self.order.touches(stream, start, tensor.nbytes, write=write, what=what, space=space)

    def _touches_slot(
        self, actor: torch.Stream | str, slot: Slot, *, write: bool, what: str
    ) -> None:
        if self._checked:
            self.order.touches(actor, slot.address, slot.nbytes, write=write, what=what)

    def _hand_over(self, tensor: torch.Tensor) -> None:
        if self._checked:
            self.order.hand_over(tensor.data_ptr(), tensor.nbytes, str(tensor.device))

    def _caller(self, device: torch.device) -> torch.Stream:
        """The stream that packs something now."""
        stream = torch.accelerator.current_stream(device)
        self._computing[device].add(stream.stream_id)
        return stream

    def _side(self, device: torch.device) -> _Side:
        side = self._sides.get(device)
        if side is None:
            out, into = torch.Stream(device=device), torch.Stream(device=device)
            origin = self._timed_mark(out)
            side = _Side(out, into, origin, now_ns(), deque(), deque())
            self._sides[device] = side
        return side

    def _host_tensor(self, slot: Slot) -> torch.Tensor:
        return _bytes_of(self._engine.alias(slot))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A tensor of all bytes of ``storage``."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
