"""The replay, on steps that can be worked out by hand, and what holds for every step."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.probe import MachineProfile
from offload.tuner import Setting
from offload.tuner.record import Beyond, BlockRecord, StepRecord, Touch
from offload.tuner.replay import Replay, ReplayedStep, plain_peak_bytes, scaled
from offload.tuner.replay_disk import Disk, DiskReplay
from offload.tuner.replay_link import LinkReplay
from offload.units import MIB
from tests.tuner.steps import FAST, MS, chain, rates, records, setting, settings_of_any_size


def disk_replay(record: StepRecord, given: Setting, profile: MachineProfile) -> DiskReplay:
    """With as much host memory as a session takes by itself."""
    return DiskReplay(record, given, profile, 2 * (given.window_bytes + given.prefetch_bytes))


Kind = Callable[[StepRecord, Setting, MachineProfile], Replay]
KINDS: list[Kind] = [LinkReplay, disk_replay]
both = pytest.mark.parametrize("kind", KINDS)
# A megabyte takes a millisecond out and two back.
SLOW = rates(MIB * 1e3, MIB * 5e2)


def predicted(kind: Kind, record: StepRecord, given: Setting, **more) -> ReplayedStep:
    return kind(record, given, more.get("profile", SLOW)).run()


@both
def test_with_time_enough_nothing_is_waited_for(kind: Kind) -> None:
    record = chain([MIB] * 4, forward_ns=2 * MS, backward_ns=4 * MS)
    found = predicted(kind, record, setting())
    assert found.seconds == pytest.approx(24e-3)
    assert (found.moved_bytes, found.moved_blocks) == (4 * MIB, 4)
    assert found.stall_seconds == found.backpressure_seconds == 0


def test_the_link_out_is_waited_for_beyond_the_window() -> None:
    """Layers of 1 ms save what takes 2 ms; two storages are on their way at most."""
    record = chain([2 * MIB] * 6, forward_ns=MS, backward_ns=10 * MS)
    found = predicted(LinkReplay, record, setting(window_bytes=2 * MIB))
    # The first is on its way until 3 ms, the second until 5 ms: the fourth save, at 4 ms, waits for
    # that, and so on.
    assert found.backpressure_seconds == pytest.approx(1e-3 + 1e-3 + 1e-3)
    assert found.seconds == pytest.approx(66e-3 + 3e-3)
    assert predicted(LinkReplay, record, setting()).backpressure_seconds == 0


def test_what_the_host_has_not_seen_leave_is_used_where_it_is() -> None:
    """The host has run ahead: for it no copy is done, and only the window makes storages leave."""
    record = chain([MIB] * 4, forward_ns=5 * MS, backward_ns=MS)
    assert predicted(LinkReplay, record, setting(window_bytes=4 * MIB)).stall_seconds == 0
    late = chain([MIB] * 4, forward_ns=5 * MS, backward_ns=MS, host_ns=1000 * MS)
    found = predicted(LinkReplay, late, setting(window_bytes=4 * MIB, prefetch_bytes=0))
    # The last one is on its way out for another millisecond when it is asked for.
    assert found.stall_seconds == pytest.approx(1e-3 + 4 * 2e-3)


def test_reads_are_waited_for_as_far_as_they_are_not_prefetched() -> None:
    record = chain([MIB] * 4, forward_ns=5 * MS, backward_ns=MS)
    without = predicted(disk_replay, record, setting(prefetch_bytes=0))
    # The last is still being written when backward begins and is used from its slot.
    assert without.stall_seconds == pytest.approx(3 * 2e-3)
    # With one on its way while the one before is taken, each layer's millisecond is hidden.
    ahead = predicted(disk_replay, record, setting(prefetch_bytes=2 * MIB))
    assert ahead.stall_seconds == pytest.approx(3 * 1e-3)
    assert ahead.seconds < without.seconds


def test_the_tail_stays() -> None:
    record = chain([MIB] * 4, forward_ns=MS, backward_ns=MS)
    for kind in KINDS:
        assert predicted(kind, record, setting(keep_last_bytes=3 * MIB)).moved_bytes == MIB
        assert predicted(kind, record, setting(keep_last_bytes=1)).moved_bytes == 3 * MIB
        assert predicted(kind, record, setting(min_offload_bytes=2 * MIB)).moved_bytes == 0


@both
def test_what_others_hold_costs_its_way_out_and_no_way_back(kind: Kind) -> None:
    record = chain([MIB] * 4, forward_ns=2 * MS, backward_ns=0)
    held = replace(record, blocks=tuple(b._replace(held=True) for b in record.blocks))
    found = predicted(kind, held, setting(window_bytes=MIB))
    assert found.moved_bytes == 4 * MIB and found.stall_seconds == 0
    assert found.peak_live_bytes >= 4 * MIB


def test_bytes_alive_on_the_device_are_window_and_tail() -> None:
    record = chain([MIB] * 16, forward_ns=0, backward_ns=0)
    windows = setting(window_bytes=2 * MIB, keep_last_bytes=3 * MIB, prefetch_bytes=0)
    found = predicted(LinkReplay, record, windows)
    assert found.peak_live_bytes == 6 * MIB  # and the one that is being saved
    # What was not settled is still there when backward begins, and two more come back beside the
    # one in use.
    ahead = predicted(LinkReplay, record, replace(windows, prefetch_bytes=3 * MIB))
    assert ahead.peak_live_bytes == 7 * MIB


def test_bytes_alive_on_the_cpu_include_the_slots() -> None:
    record = chain([MIB] * 16, forward_ns=0, backward_ns=0)
    windows = setting(window_bytes=2 * MIB, prefetch_bytes=0)
    # Two slots, and what the second is filled from.
    assert predicted(disk_replay, record, windows).peak_live_bytes == 3 * MIB
    # Backward begins with two that are still being written, and two more come back.
    ahead = predicted(disk_replay, record, replace(windows, prefetch_bytes=3 * MIB))
    assert ahead.peak_live_bytes == 4 * MIB
    assert plain_peak_bytes(record) == 16 * MIB


def test_copies_into_slots_take_the_computing_thread() -> None:
    record = chain([MIB] * 4, forward_ns=2 * MS, backward_ns=4 * MS)
    slower = rates(MIB * 1e3, MIB * 5e2, copy=MIB * 1e3)
    found = predicted(disk_replay, record, setting(), profile=slower)
    assert found.seconds == pytest.approx(24e-3 + 4e-3)


def test_a_storage_that_two_operations_saved_moves_once() -> None:
    blocks = (BlockRecord(MIB, True, False),)
    touches = (
        Touch(0, 0, 0, 0, False), Touch(0, 0, 0, 1, False),
        Touch(50 * MS, 50 * MS, 0, 1, True), Touch(60 * MS, 60 * MS, 0, 0, True),
    )  # fmt: skip
    record = StepRecord(blocks, touches, 70 * MS)
    for kind in KINDS:
        found = predicted(kind, record, setting(prefetch_bytes=0))
        assert (found.moved_bytes, found.moved_blocks) == (MIB, 1)
        assert found.stall_seconds == pytest.approx(2e-3)


def test_memory_beyond_saved_storages_counts_where_it_is_known() -> None:
    record = chain([MIB] * 4, forward_ns=MS, backward_ns=MS)
    beyond = tuple(Beyond(5 * MIB if i == 3 else MIB, MIB) for i in range(9))
    # Three saved, and five while the fourth is made.
    assert plain_peak_bytes(replace(record, beyond=beyond)) == 8 * MIB
    last = (*[Beyond(0, 0)] * 8, Beyond(9 * MIB, 0))
    assert plain_peak_bytes(replace(record, beyond=last)) == 9 * MIB


# -- every step ------------------------------------------------------------------------------------


@given(records(), settings_of_any_size(), st.sampled_from(KINDS))
def test_bounds(record: StepRecord, given_setting: Setting, kind: Kind) -> None:
    found = kind(record, given_setting, SLOW).run()
    waited = found.stall_seconds + found.backpressure_seconds
    assert found.seconds == pytest.approx(record.end_ns / 1e9 + waited)
    assert waited >= 0
    large = [b for b in record.blocks if b.movable and b.nbytes >= given_setting.min_offload_bytes]
    saved = {t.block for t in record.touches if not t.is_use}
    assert found.moved_bytes <= sum(b.nbytes for b in large)
    assert found.moved_blocks <= len(saved)
    assert max(b.nbytes for i, b in enumerate(record.blocks) if i in saved) <= found.peak_live_bytes
    # The worst: every byte twice out, and back, one after the other.
    moved_ms = found.moved_bytes / MIB
    assert waited <= (2 * moved_ms + 2 * moved_ms) * 1e-3 + 1e-9


@given(records(), st.sampled_from(KINDS))
def test_nothing_moves_with_everything_kept(record: StepRecord, kind: Kind) -> None:
    found = kind(record, setting(keep_last_bytes=1 << 60), SLOW).run()
    assert found.seconds == record.end_ns / 1e9
    assert found.peak_live_bytes == plain_peak_bytes(record)
    assert found.moved_bytes == 0


@given(records(), settings_of_any_size(), st.sampled_from(KINDS))
def test_without_waits_on_endlessly_fast_paths(
    record: StepRecord, given_setting: Setting, kind: Kind
) -> None:
    found = kind(record, given_setting, FAST).run()
    assert found.seconds == pytest.approx(record.end_ns / 1e9, abs=1e-9)


@given(records(), st.floats(0.1, 10))
def test_scaling_changes_times_only(record: StepRecord, factor: float) -> None:
    longer = scaled(record, factor * record.end_ns / 1e9) if record.end_ns else record
    assert longer.blocks == record.blocks
    assert plain_peak_bytes(longer) == plain_peak_bytes(record)
    assert longer.end_ns == pytest.approx(factor * record.end_ns, abs=10)


# -- the disk --------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(1, 1000), st.integers(0, 500)), min_size=1, max_size=12
    )
)
def test_the_disk_is_never_idle_and_never_does_two_things(
    queued: list[tuple[bool, int, int]],
) -> None:
    """At equal rates the end of the last transfer is that of one server; writes keep their order,
    and no read waits for a write that had not begun.
    """
    disk = Disk(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
    at, free, transfers = 0.0, 0.0, []
    for is_read, nbytes, pause in queued:
        at += pause
        free = max(free, at) + nbytes
        move = disk.read if is_read else disk.write
        transfers.append((is_read, at, nbytes, move(0, nbytes, at)))
    ends = [disk.end_of(t) for *_, t in transfers]
    assert max(ends) == pytest.approx(free)
    writes = [end for end, (is_read, *_) in zip(ends, transfers, strict=True) if not is_read]
    assert writes == sorted(writes)
    for end, (is_read, started, nbytes, _) in zip(ends, transfers, strict=True):
        assert end >= started + nbytes - 1e-6
        reads = sum(n for r, _, n, _ in transfers if r)
        assert not is_read or end <= started + reads + 1e-6


def test_a_write_is_taken_back_only_before_it_has_begun() -> None:
    disk = Disk(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
    first, second = disk.write(0, 100, 0), disk.write(1, 100, 0)
    disk.advance(10)
    assert not disk.cancel(first) and disk.cancel(second)
    assert disk.end_of(first) == pytest.approx(100)
    assert disk.end_of(disk.write(2, 50, 0)) == pytest.approx(150)


def test_an_urgent_read_goes_first() -> None:
    disk = Disk(write_bytes_per_s=1e9, read_bytes_per_s=1e9)
    disk.read(0, 100, 0)
    waiting = disk.read(1, 100, 0)
    urgent = disk.read(2, 50, 10, urgent=True)
    assert disk.end_of(urgent) == pytest.approx(60)
    disk.promote(waiting)
    assert disk.end_of(waiting) == pytest.approx(160)
