"""Facts about the machine and a directory that are read, not measured.

Everything comes from files below ``root`` and from system calls, so that a test can lay out the
files of another machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from offload.system.machine import filesystem_of, memory_limit_bytes, numbers_in, text_in

__all__ = ["DirectoryFacts", "HostFacts", "directory_facts", "host_facts"]


@dataclass(frozen=True)
class HostFacts:
    """Processor, memory and limits.

    Attributes:
        cpu: its name.
        cpus: logical processors that this process may use.
        memory_bytes: the machine's.
        available_bytes: what could be had now without swapping.
        cgroup_limit_bytes: the control group's limit of memory; None where there is none.
        memlock_bytes: most memory that may be locked (``ulimit -l``); None without a limit.
        huge_pages: mode of transparent huge pages, ``"always"``, ``"madvise"`` or ``"never"``;
            None where the kernel has none.
        hugetlb_free: free preallocated huge pages of 2 MiB.
        numa_nodes: nodes with memory.
    """

    cpu: str
    cpus: int
    memory_bytes: int
    available_bytes: int
    cgroup_limit_bytes: int | None
    memlock_bytes: int | None
    huge_pages: str | None
    hugetlb_free: int
    numa_nodes: int


def host_facts(root: Path = Path("/")) -> HostFacts:
    """What the files below ``root`` say about the machine."""
    memory = psutil.virtual_memory()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    mode = re.search(r"\[(\w+)\]", text_in(root / "sys/kernel/mm/transparent_hugepage/enabled"))
    free = text_in(root / "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages")
    name = re.search(r"^model name\s*:\s*(.+)$", text_in(root / "proc/cpuinfo"), re.MULTILINE)
    return HostFacts(
        cpu=name[1].strip() if name else "unknown",
        cpus=len(os.sched_getaffinity(0)),
        memory_bytes=int(memory.total),
        available_bytes=int(memory.available),
        cgroup_limit_bytes=memory_limit_bytes(str(root)),
        memlock_bytes=None if locked == resource.RLIM_INFINITY else locked,
        huge_pages=mode[1] if mode else None,
        hugetlb_free=int(free or 0),
        numa_nodes=len(numbers_in(text_in(root / "sys/devices/system/node/has_memory"))) or 1,
    )


@dataclass(frozen=True)
class DirectoryFacts:
    """Where a scratch file in a directory would lie.

    Attributes:
        directory: as given, made absolute.
        filesystem: as the kernel names it.
        mount_point: of the file system.
        source: what is mounted there, a block device for instance.
        free_bytes: for this user.
        in_memory: its files take up memory (tmpfs).
        rotational: a spinning disk; None where the kernel does not tell.
        direct_memory_bytes: alignment of memory for direct I/O; 0: none; None: not told.
        direct_offset_bytes: the same for offsets and sizes.
        is_direct: whether a file there can be opened for direct I/O.
    """

    directory: str
    filesystem: str
    mount_point: str
    source: str
    free_bytes: int
    in_memory: bool
    rotational: bool | None
    direct_memory_bytes: int | None
    direct_offset_bytes: int | None
    is_direct: bool


def directory_facts(directory: str, root: Path = Path("/")) -> DirectoryFacts:
    """What is known about files in ``directory``.

    Raises:
        FileNotFoundError: there is no such directory.
        PermissionError: it is not writable.
    """
    path = os.path.realpath(directory)
    filesystem = filesystem_of(path)
    sources = {p.mountpoint: p.device for p in psutil.disk_partitions(all=True)}
    alignment = None
    with tempfile.TemporaryFile(dir=path) as file:
        alignment = _direct_alignment(file.fileno())
        is_direct = _opens_direct(file.fileno())
    return DirectoryFacts(
        directory=path,
        filesystem=filesystem.kind,
        mount_point=filesystem.mount_point,
        source=sources.get(filesystem.mount_point, "unknown"),
        free_bytes=filesystem.free_bytes,
        in_memory=filesystem.in_memory,
        rotational=_rotational(os.stat(path).st_dev, root),
        direct_memory_bytes=alignment[0] if alignment else None,
        direct_offset_bytes=alignment[1] if alignment else None,
        is_direct=is_direct,
    )


def _opens_direct(descriptor: int) -> bool:
    with contextlib.suppress(OSError):
        again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_DIRECT)
        os.close(again)
        return True
    return False


_AT_EMPTY_PATH, _STATX_DIOALIGN = 0x1000, 0x2000
_STATX_BYTES, _MASK_AT, _ALIGNMENT_AT = 256, 0, 152  # of struct statx, see statx(2)


def _direct_alignment(descriptor: int) -> tuple[int, int] | None:
    """Memory and offset alignment that direct I/O wants, in bytes; None where statx(2) does not
    tell (Linux before 6.1, or another C library). Python has no statx before 3.15.
    """
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return None
    told = ctypes.c_uint32.from_buffer(buffer, _MASK_AT).value & _STATX_DIOALIGN
    memory, offset = (ctypes.c_uint32 * 2).from_buffer(buffer, _ALIGNMENT_AT)
    return (memory, offset) if told else None


def _rotational(device: int, root: Path) -> bool | None:
    here = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    for queue in (here / "queue", here.resolve().parent / "queue"):  # a partition has its disk's
        text = text_in(queue / "rotational")
        if text:
            return text == "1"
    return None
