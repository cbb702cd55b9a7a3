"""Host memory of an accelerator's session: pinned as it grows, and never beyond its budget."""

from collections.abc import Iterator

import pytest

from offload.config import Config
from offload.engines import Engine, open_engine
from offload.errors import OffloadWarning
from offload.tiers.host import HostTier
from offload.units import MIB
from tests.conftest import wait_until

PAGE = 4096


class Recorder:
    """A pinner that notes what it is asked for."""

    def __init__(self, refusal: str = "") -> None:
        self.pinned: dict[int, int] = {}
        self._refusal = refusal

    def pin(self, address: int, nbytes: int) -> None:
        if self._refusal:
            raise RuntimeError(self._refusal)
        self.pinned[address] = nbytes

    def unpin(self, address: int) -> None:
        del self.pinned[address]


@pytest.fixture
def real_engine(engine: str, tmp_path) -> Iterator[Engine]:
    opened = open_engine(Config(engine=engine, disk_dir=tmp_path))
    yield opened
    opened.close()


def test_nothing_is_pinned_before_it_is_needed(real_engine: Engine) -> None:
    pinner = Recorder()
    host = HostTier(real_engine, 8 * MIB, pinner)
    assert pinner.pinned == {}
    slot = host.slot(PAGE)
    assert slot is not None
    assert sum(pinner.pinned.values()) == 8 * MIB
    assert host.used_bytes == PAGE


def test_budget_is_hard_and_slots_come_back(real_engine: Engine) -> None:
    host = HostTier(real_engine, 4 * PAGE, Recorder())
    slots = [host.slot(PAGE) for _ in range(4)]
    assert all(slot is not None for slot in slots)
    assert host.slot(1) is None
    assert host.free_bytes == 0
    slots.pop()
    assert host.slot(PAGE) is not None


def test_memory_grows_by_slabs_within_the_budget(real_engine: Engine, monkeypatch) -> None:
    monkeypatch.setattr("offload.tiers.host._GROWTH_BYTES", 4 * MIB)
    pinner = Recorder()
    host = HostTier(real_engine, 10 * MIB, pinner)
    slots = []
    for pinned_bytes in (4 * MIB, 4 * MIB, 8 * MIB, 8 * MIB, 10 * MIB):
        slots.append(host.slot(2 * MIB))
        assert sum(pinner.pinned.values()) == pinned_bytes
    assert all(slot is not None for slot in slots)
    assert host.used_bytes == 10 * MIB
    assert host.slot(1) is None


def test_larger_than_the_budget_travels_alone(real_engine: Engine) -> None:
    host = HostTier(real_engine, 4 * PAGE, Recorder())
    slot = host.slot(5 * PAGE)
    assert slot is not None
    assert (host.used_bytes, host.outside_bytes, host.held_bytes) == (0, 5 * PAGE, 5 * PAGE)
    assert host.slot(5 * PAGE) is None, "one at a time"
    del slot
    wait_until(lambda: host.outside_bytes == 0)
    assert host.slot(5 * PAGE) is not None


def test_closing_unpins(real_engine: Engine) -> None:
    pinner = Recorder()
    host = HostTier(real_engine, 8 * MIB, pinner)
    host.slot(PAGE)
    host.close()
    assert pinner.pinned == {}
    host.close()


def test_dying_unpins(real_engine: Engine) -> None:
    pinner = Recorder()
    host = HostTier(real_engine, 8 * MIB, pinner)
    host.slot(PAGE)
    del host
    assert pinner.pinned == {}


def test_a_driver_that_refuses(real_engine: Engine) -> None:
    """Copies from memory that is not pinned are slow, not wrong."""
    host = HostTier(real_engine, 8 * MIB, Recorder(refusal="out of memory"))
    with pytest.warns(OffloadWarning, match="refused to pin 8 MiB.*out of memory.*lower"):
        slot = host.slot(PAGE)
    assert slot is not None


def test_what_is_free_goes_back_to_the_system_unless_it_is_pinned(real_engine: Engine) -> None:
    """New pages read as zeros; what was kept has its bytes still."""

    def reused(host: HostTier) -> list[int]:
        slots = [host.slot(MIB), host.slot(MIB)]
        for slot in slots:
            real_engine.alias(slot).fill_(7)
        del slot, slots
        host.trim(MIB)
        again = [host.slot(MIB), host.slot(MIB)]
        return [real_engine.alias(slot)[MIB - 1] for slot in again]

    assert reused(HostTier(real_engine, 4 * MIB, None)) == [7, 0]
    assert reused(HostTier(real_engine, 4 * MIB, Recorder())) == [7, 7]


def test_what_is_in_use_is_not_trimmed(real_engine: Engine) -> None:
    host = HostTier(real_engine, 4 * MIB, None)
    slots = [host.slot(MIB) for _ in range(3)]
    view = real_engine.alias(slots[1])
    view.fill_(7)
    slots.clear()
    host.trim(0)
    assert view[0] == view[MIB - 1] == 7
