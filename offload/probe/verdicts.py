"""Verdicts: what the facts and rates mean for offloading, and what to do about it.

Every rule takes values and returns a ``Finding`` or None; ``findings`` asks them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from offload.probe.disk import DiskRates, FioRates
from offload.probe.facts import DirectoryFacts, HostFacts
from offload.probe.link import AcceleratorFacts, LinkRates
from offload.units import format_bytes

__all__ = ["Finding", "Level", "Survey", "best_rates", "findings", "hidden_from_width"]

_SLOW_DISK_BYTES_PER_S = 0.5e9
_FIO_SHARE = 0.8
_LINK_SHARE = 0.6
_BETTER_SETTING = 1.25
_LAYER_LENGTH = 2048
_WIDE_LAYER = 8192


class Level(Enum):
    """How much a finding matters."""

    GOOD = "good"
    NOTE = "note"  # good to know
    WARNING = "warning"  # it works, slower or with less room than it could
    BAD = "bad"  # offloading here would not do what it is for


@dataclass(frozen=True)
class Finding:
    """One verdict, and what to do (empty where there is nothing to do)."""

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Survey:
    """Everything that a probe found; None for what is not there or was not measured.

    Attributes:
        quick: whether the short form was measured.
        native: whether the C++ engine was used.
        disk: the rates of every setting that was measured, the session's default first.
        flops_per_s: of matrix products on the device that trains.
        no_pool: why tensors of the CPU cannot have their memory from the pool; empty if they can,
            or if it does not matter.
    """

    quick: bool
    native: bool
    host: HostFacts
    directory: DirectoryFacts
    disk: tuple[DiskRates, ...]
    fio: FioRates | None
    accelerator: AcceleratorFacts | None
    link: LinkRates | None
    copy_bytes_per_s: float | None
    flops_per_s: float | None
    no_pool: str = ""


def best_rates(rates: Sequence[DiskRates]) -> DiskRates:
    """The setting whose step would wait least: the same bytes are written and read once each.

    Example:
        >>> fast, slow = DiskRates(2, 1, 4e9, 2e9, 2e9, 1e9), DiskRates(1, 1, 5e9, 1e9, 2e9, 1e9)
        >>> best_rates([slow, fast]) is fast
        True
    """
    return min(rates, key=_seconds_per_byte)


def _seconds_per_byte(rates: DiskRates) -> float:
    return 1 / rates.write_bytes_per_s + 1 / rates.read_bytes_per_s


def hidden_from_width(
    flops_per_s: float, bytes_per_s: float, *, length: int, element_bytes: int
) -> int:
    """The narrowest GPT layer whose saved bytes leave no slower than its forward computes.

    A layer of width h saves 16h values a token (4h of inputs to norms and residuals, 3h of q, k
    and v, h of attention's result, 8h in the MLP) and computes 24h^2 + 2 h T operations (Kaplan et
    al. 2020; T tokens, causal), so it needs ``16 h e R / (24 h^2 + 2 h T)`` bytes per second.
    Its backward takes twice as long for the same bytes.

    Args:
        flops_per_s: what the device computes.
        bytes_per_s: what the link or the disk takes.
        length: tokens in a row.
        element_bytes: of one value.

    Example:
        >>> hidden_from_width(400e12, 50e9, length=8192, element_bytes=2)
        9984
    """
    needed = 16 * element_bytes * flops_per_s / bytes_per_s
    width = max(0.0, (needed - 2 * length) / 24)
    return int(-(-width // 64) * 64) or 64


def findings(survey: Survey) -> list[Finding]:
    """What all rules say, the gravest first."""
    s = survey
    found: Iterable[Finding | None] = (
        in_memory(s.directory),
        *((disk_speed(s), setting(s.disk), beside_fio(s)) if s.disk else ()),
        direct_io(s.directory),
        room(s.directory, s.host),
        engine(s.native),
        pool(s.no_pool) if s.native else None,
        huge_pages(s.host),
        memory_limit(s.host),
        nodes(s.host, s.accelerator),
        *((pinning(s.link, s.host), link_speed(s)) if s.link else ()),
        pcie(s.accelerator) if s.accelerator else None,
    )
    order = [Level.BAD, Level.WARNING, Level.NOTE, Level.GOOD]
    return sorted((f for f in found if f is not None), key=lambda f: order.index(f.level))


# -- the disk --------------------------------------------------------------------------------------


def in_memory(directory: DirectoryFacts) -> Finding | None:
    """A file in memory frees no memory."""
    if not directory.in_memory:
        return None
    return Finding(
        Level.BAD,
        f"{directory.directory} is on {directory.filesystem}, which keeps files in memory: "
        "offloading there frees nothing",
        "name a directory on a disk (disk_dir, or $OFFLOAD_DIR)",
    )


def direct_io(directory: DirectoryFacts) -> Finding | None:
    """Without direct I/O the page cache takes memory and a copy."""
    if directory.in_memory or (directory.is_direct and directory.direct_offset_bytes != 0):
        return None
    return Finding(
        Level.WARNING,
        f"{directory.filesystem} does no direct I/O: everything passes through the page cache, "
        "which costs a copy and competes for memory",
        "prefer ext4 or xfs",
    )


def room(directory: DirectoryFacts, host: HostFacts) -> Finding | None:
    """A scratch file holds the activations of a step, which may be as much as memory is."""
    if directory.in_memory or directory.free_bytes >= host.memory_bytes:
        return None
    level = Level.WARNING if directory.free_bytes < host.memory_bytes // 4 else Level.NOTE
    return Finding(
        level,
        f"{format_bytes(directory.free_bytes)} are free in {directory.directory}, less than the "
        f"{format_bytes(host.memory_bytes)} of memory; what finds no room stays in memory",
        "free some space, or name a larger disk",
    )


def disk_speed(survey: Survey) -> Finding | None:
    """Whether a layer computes long enough to hide what it writes, where steps write to disk."""
    rates, directory = survey.disk[0], survey.directory
    if directory.in_memory:
        return None
    written, read = rates.write_bytes_per_s, rates.read_bytes_per_s
    told = f"disk: {written / 1e9:.2f} GB/s written, {read / 1e9:.2f} read"
    spinning = directory.rotational and min(written, read) < _SLOW_DISK_BYTES_PER_S
    fix = "use an SSD" if spinning else "use a faster disk, or recompute what it cannot take"
    if survey.accelerator is not None:
        slow = min(written, read) < _SLOW_DISK_BYTES_PER_S
        return Finding(Level.WARNING if slow else Level.GOOD, told, fix if slow else "")
    if survey.flops_per_s is None:
        return None
    slowest = min(written, 2 * read)  # backward takes twice as long
    return _layers(told, survey.flops_per_s, slowest, 4, fix)


def _layers(told: str, flops: float, bytes_per_s: float, element_bytes: int, fix: str) -> Finding:
    width = hidden_from_width(flops, bytes_per_s, length=_LAYER_LENGTH, element_bytes=element_bytes)
    kind = "float32" if element_bytes == 4 else "bfloat16"
    if width > _WIDE_LAYER:
        text = f"{told}: no GPT layer up to width {_WIDE_LAYER} would be hidden at T "
        return Finding(Level.WARNING, f"{text}{_LAYER_LENGTH} ({kind})", fix)
    text = f"{told}: GPT layers of width {width} and more are hidden at T {_LAYER_LENGTH} ({kind})"
    return Finding(Level.GOOD if width <= 1024 else Level.NOTE, text, fix if width > 1024 else "")


def setting(disk: Sequence[DiskRates]) -> Finding | None:
    """Whether another number of threads or size of blocks is faster than the default, the first."""
    best, default = best_rates(disk), disk[0]
    gain = _seconds_per_byte(default) / _seconds_per_byte(best)
    if gain < _BETTER_SETTING:
        return None
    return Finding(
        Level.WARNING,
        f"the disk is {gain:.2f} times as fast with {best.io_threads} threads and blocks of "
        f"{format_bytes(best.io_block_bytes)} as with the default",
        f"io_threads={best.io_threads}, io_block_bytes={best.io_block_bytes}",
    )


def beside_fio(survey: Survey) -> Finding | None:
    """Whether the engine gets out of the disk what fio does."""
    fio, ours = survey.fio, best_rates(survey.disk)
    if fio is None:
        return None
    written = ours.write_bytes_per_s / fio.write_bytes_per_s
    read = ours.read_bytes_per_s / fio.read_bytes_per_s
    told = f"the engine reaches {written:.2f} of fio's writes and {read:.2f} of its reads"
    if min(written, read) >= _FIO_SHARE:
        return Finding(Level.GOOD, told)
    return Finding(Level.WARNING, told, "try more io_threads; was the machine busy meanwhile?")


# -- the host --------------------------------------------------------------------------------------


def engine(native: bool) -> Finding | None:
    """The Python engine costs interpreter time."""
    if native:
        return None
    return Finding(
        Level.WARNING,
        "the C++ extension was not built: the slower 'aio' engine is used",
        "install a C++17 compiler and reinstall the package",
    )


def pool(reason: str) -> Finding | None:
    """Without it the process keeps what offloading frees."""
    if not reason:
        return None
    return Finding(
        Level.WARNING,
        f"tensors have their memory from the system, as {reason}: the process hardly gets smaller",
        "start it without that, or measure what it takes with its own allocator",
    )


def huge_pages(host: HostFacts) -> Finding | None:
    """Direct I/O through pages of 4 KiB is about half as fast as through 2 MiB."""
    if host.huge_pages in ("always", "madvise"):
        return None
    found = "are switched off" if host.huge_pages == "never" else "are not in this kernel"
    return Finding(
        Level.WARNING,
        f"transparent huge pages {found}: direct I/O through small pages is about half as fast",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled (as root)",
    )


def memory_limit(host: HostFacts) -> Finding | None:
    """A control group ends a process that passes its limit."""
    limit = host.cgroup_limit_bytes
    if limit is None or limit >= host.memory_bytes:
        return None
    return Finding(
        Level.NOTE,
        f"the control group allows {format_bytes(limit)} of the machine's "
        f"{format_bytes(host.memory_bytes)} of memory; budgets go by that",
    )


def nodes(host: HostFacts, accelerator: AcceleratorFacts | None) -> Finding | None:
    """Memory of another node is reached over the processors' own link."""
    if host.numa_nodes < 2:
        return None
    if accelerator is not None:
        return Finding(
            Level.NOTE,
            f"{host.numa_nodes} NUMA nodes: pinned memory is taken on the device's node; let the "
            "process run there too",
            "numactl --cpunodebind=N --preferred=N, N as nvidia-smi topo -m shows",
        )
    return Finding(
        Level.NOTE,
        f"{host.numa_nodes} NUMA nodes: keep a process and its memory on one of them",
        "numactl --cpunodebind=N --membind=N",
    )


# -- the accelerator -------------------------------------------------------------------------------


def pinning(link: LinkRates, host: HostFacts) -> Finding | None:
    """Copies from memory that is not pinned block the host and do not overlap."""
    if link.pinned:
        return None
    limited = "" if host.memlock_bytes is None else f" ({format_bytes(host.memlock_bytes)} now)"
    return Finding(
        Level.BAD,
        "host memory could not be pinned: copies block the host and hide nothing",
        f"ulimit -l unlimited{limited}, or an adapter in offload.lanes.pinning.PINNERS for this "
        "kind of device",
    )


def pcie(accelerator: AcceleratorFacts) -> Finding | None:
    """A link below what slot and device could do."""
    link = accelerator.pcie
    if link is None:
        return Finding(
            Level.NOTE,
            f"the PCIe link of {accelerator.device} is unknown: {accelerator.why_no_pcie}",
        )
    if link.bytes_per_s >= 0.99 * link.max_bytes_per_s:
        return None
    return Finding(
        Level.WARNING,
        f"{accelerator.device} runs on PCIe {link.generation} x{link.width}, and could on "
        f"{link.max_generation} x{link.max_width}",
        "check slot, riser and BIOS (an idle link may lower its generation: compare under load)",
    )


def link_speed(survey: Survey) -> Finding | None:
    """Whether the link carries what it should, and what layers it hides."""
    link, accelerator = survey.link, survey.accelerator
    assert link is not None
    slowest = min(link.duplex_out_bytes_per_s, 2 * link.duplex_in_bytes_per_s)
    told = (
        f"link: {link.out_bytes_per_s / 1e9:.1f} GB/s out, {link.in_bytes_per_s / 1e9:.1f} in, "
        f"{link.duplex_out_bytes_per_s / 1e9:.1f} + {link.duplex_in_bytes_per_s / 1e9:.1f} at once"
    )
    physical = accelerator.pcie if accelerator is not None else None
    if physical is not None:
        share = min(link.out_bytes_per_s, link.in_bytes_per_s) / physical.bytes_per_s
        if share < _LINK_SHARE:
            return Finding(
                Level.WARNING,
                f"{told}, {share:.0%} of what PCIe {physical.generation} x{physical.width} carries",
                "bind the process to the device's NUMA node; look for other users of the link",
            )
    if survey.flops_per_s is None:
        return None
    return _layers(told, survey.flops_per_s, slowest, 2, "longer rows, or recompute a part")
