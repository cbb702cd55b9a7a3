"""Steps as values: records that are written down, not recorded."""

from collections.abc import Sequence

from hypothesis import strategies as st

from offload.probe import MachineProfile
from offload.tuner import Setting
from offload.tuner.record import BlockRecord, StepRecord, Touch
from offload.units import KIB, MIB

MS = 1_000_000  # in ns

FAST = MachineProfile(
    disk_write_bytes_per_s=1e15, disk_read_bytes_per_s=1e15, link_out_bytes_per_s=1e15,
    link_in_bytes_per_s=1e15, link_latency_seconds=0.0,
)  # fmt: skip


def rates(out: float, into: float, copy: float | None = None) -> MachineProfile:
    """A machine whose link and disk are both of these speeds, in bytes per second."""
    return MachineProfile(
        disk_write_bytes_per_s=out, disk_read_bytes_per_s=into, link_out_bytes_per_s=out,
        link_in_bytes_per_s=into, link_latency_seconds=0.0, copy_bytes_per_s=copy,
    )  # fmt: skip


def setting(
    window_bytes: int = 1 << 40,
    prefetch_bytes: int = 1 << 40,
    keep_last_bytes: int = 0,
    min_offload_bytes: int = 0,
) -> Setting:
    """Windows that hold nothing back, unless told otherwise."""
    return Setting(
        min_offload_bytes, window_bytes, prefetch_bytes, keep_last_bytes, 2, 8 * MIB
    )  # fmt: skip


def chain(sizes: Sequence[int], forward_ns: int, backward_ns: int, host_ns: int = 0) -> StepRecord:
    """A chain of layers that save one storage each, and use them in reverse.

    Each layer takes ``forward_ns`` and ``backward_ns``. The host is at ``host_ns`` throughout: it
    has run ahead to the end if that is 0.
    """
    blocks = tuple(BlockRecord(n, True, False) for n in sizes)
    count = len(sizes)
    saves = [Touch((i + 1) * forward_ns, host_ns, i, i, False) for i in range(count)]
    turn_ns = count * forward_ns
    uses = [
        Touch(turn_ns + i * backward_ns, host_ns, count - 1 - i, count - 1 - i, True)
        for i in range(count)
    ]
    return StepRecord(blocks, (*saves, *uses), turn_ns + count * backward_ns)


@st.composite
def records(draw: st.DrawFn) -> StepRecord:
    """Any step: storages saved several times and used in any order, some never, some not ours."""
    count = draw(st.integers(1, 8))
    flags = st.booleans()
    blocks = tuple(
        BlockRecord(
            draw(st.integers(1, 64)) * 4 * KIB, draw(flags), draw(st.sampled_from([0, 0, 1]))
        )
        for _ in range(count)
    )
    times = st.integers(0, 5 * MS)
    at_ns, touches, saved = 0, [], []
    for block in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=14)):
        at_ns += draw(times)
        touches.append(Touch(at_ns, at_ns // 2, block, len(saved), False))
        saved.append(block)
    for save in draw(st.lists(st.integers(0, len(saved) - 1), max_size=20)):
        at_ns += draw(times)
        touches.append(Touch(at_ns, at_ns // 2, saved[save], save, True))
    return StepRecord(blocks, tuple(touches), at_ns + draw(times))


@st.composite
def settings_of_any_size(draw: st.DrawFn) -> Setting:
    """Windows from less than a page to more than everything."""
    sizes = st.sampled_from([0, 4 * KIB, 64 * KIB, 256 * KIB, 1 << 30])
    window_bytes = max(4 * KIB, draw(sizes))
    return setting(window_bytes, draw(sizes), draw(sizes), draw(sizes))
