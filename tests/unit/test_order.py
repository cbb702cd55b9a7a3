"""The order checker, with streams that do nothing: what events order passes, what they do not is
named.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest

from offload.errors import OrderError
from offload.lanes.order import HOST, CheckedOrder, Order, open_order

DEVICE = "gpu:0"


class IdleEvent:
    """An event that is done when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        self.passed = True


@dataclass
class IdleStream:
    """Has the face of ``torch.Stream`` that an order uses."""

    stream_id: int
    device: str = DEVICE
    waited: list[IdleEvent] = field(default_factory=list)

    def record_event(self) -> IdleEvent:
        return IdleEvent()

    def wait_event(self, event: IdleEvent) -> None:
        self.waited.append(event)


@pytest.fixture
def order() -> CheckedOrder:
    return CheckedOrder()


@pytest.fixture
def streams() -> tuple[Any, Any]:
    return IdleStream(0), IdleStream(1)


def write(order: Order, actor: Any, start: int = 0, nbytes: int = 64, space: str = DEVICE) -> None:
    order.touches(actor, start, nbytes, write=True, what="writing", space=space)


def read(order: Order, actor: Any, start: int = 0, nbytes: int = 64, space: str = DEVICE) -> None:
    order.touches(actor, start, nbytes, write=False, what="reading", space=space)


def test_one_stream_is_in_order(order, streams) -> None:
    write(order, streams[0])
    read(order, streams[0])
    write(order, streams[0])


@pytest.mark.parametrize("first", [write, read])
@pytest.mark.parametrize("second", [write, read])
def test_two_streams_need_an_event(order, streams, first, second) -> None:
    a, b = streams
    first(order, a)
    if first is second is read:
        second(order, b)  # two readers do not disturb each other
        return
    with pytest.raises(OrderError) as raised:
        second(order, b)
    said = str(raised.value)
    assert f"{second.__name__[:-1] if second is write else second.__name__}" in said
    assert "stream 1 of gpu:0" in said
    assert "stream 0 of gpu:0" in said
    assert "64 bytes at 0x0 of gpu:0 memory" in said


def test_an_event_orders(order, streams) -> None:
    a, b = streams
    write(order, a)
    order.wait(b, order.record(a))
    write(order, b)


def test_an_event_orders_what_came_before_it_only(order, streams) -> None:
    a, b = streams
    mark = order.record(a)
    write(order, a)
    order.wait(b, mark)
    with pytest.raises(OrderError):
        read(order, b)


def test_events_order_through_a_third(order, streams) -> None:
    a, b = streams
    c = IdleStream(2)
    write(order, a)
    order.wait(b, order.record(a))
    order.wait(c, order.record(b))
    write(order, c)


def test_the_host_learns_from_a_query_that_says_yes(order, streams) -> None:
    a, b = streams
    write(order, a)
    mark = order.record(a)
    assert not order.done(mark)
    with pytest.raises(OrderError):
        read(order, HOST)
    mark.event.passed = True
    assert order.done(mark)
    read(order, HOST)
    write(order, b)  # queued by a host that knows


def test_the_host_learns_by_waiting(order, streams) -> None:
    write(order, streams[0])
    order.synchronize(order.record(streams[0]))
    write(order, HOST)


def test_what_the_host_does_later_is_not_known_to_the_stream(order, streams) -> None:
    a, _ = streams
    mark = order.record(a)
    write(order, HOST)
    write(order, a)  # launched after it
    order.synchronize(mark)
    with pytest.raises(OrderError):
        write(order, HOST)


@pytest.mark.parametrize(
    ("start", "nbytes", "overlaps"),
    [(0, 64, True), (63, 1, True), (64, 64, False), (16, 8, True), (-8, 16, True), (-8, 8, False)],
)
def test_only_bytes_in_common_count(order, streams, start, nbytes, overlaps) -> None:
    a, b = streams
    write(order, a, 0, 64)
    if overlaps:
        with pytest.raises(OrderError):
            write(order, b, start, nbytes)
    else:
        write(order, b, start, nbytes)


def test_parts_have_a_history_of_their_own(order, streams) -> None:
    a, b = streams
    write(order, a, 0, 64)
    order.wait(b, order.record(a))
    write(order, b, 16, 16)
    read(order, a, 0, 16)
    read(order, a, 32, 32)
    with pytest.raises(OrderError):
        read(order, a, 24, 16)


def test_memories_do_not_mix(order, streams) -> None:
    a, b = streams
    write(order, a, space="gpu:0")
    write(order, b, space="gpu:1")
    write(order, b, space="host")


def test_memory_handed_over_starts_anew(order, streams) -> None:
    a, b = streams
    write(order, a)
    order.hand_over(0, 64, DEVICE)
    write(order, b)


def test_switched_on_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, kind in [("1", CheckedOrder), ("0", Order), ("", Order)]:
        monkeypatch.setenv("OFFLOAD_CHECK", value)
        assert type(open_order()) is kind
    monkeypatch.delenv("OFFLOAD_CHECK")
    assert type(open_order()) is Order
