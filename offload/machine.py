"""What this machine offers: memory, and the file system that a directory is on."""

import os
import shutil
from typing import NamedTuple

import psutil

# File systems that keep their files in memory: offloading to one frees nothing.
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})


class Filesystem(NamedTuple):
    """Where a directory's files would lie."""

    kind: str  # as the kernel names it ("ext4", "tmpfs"), or "unknown"
    mount_point: str
    free_bytes: int

    @property
    def in_memory(self) -> bool:
        """Whether its files take up memory, not disk."""
        return self.kind in _MEMORY_FILESYSTEMS


def filesystem_of(directory: str) -> Filesystem:
    """The file system that ``directory`` is on: the longest mount point that holds it.

    Raises:
        FileNotFoundError: there is no such directory.
    """
    path = os.path.realpath(directory)
    holders = [
        p
        for p in psutil.disk_partitions(all=True)
        if os.path.commonpath([path, p.mountpoint]) == p.mountpoint
    ]
    # Of several mounts on one point the last one is what is seen.
    best = max(enumerate(holders), key=lambda e: (len(e[1].mountpoint), e[0]), default=(0, None))[1]
    free_bytes = shutil.disk_usage(path).free
    if best is None:
        return Filesystem("unknown", "/", free_bytes)
    return Filesystem(best.fstype or "unknown", best.mountpoint, free_bytes)


def has_huge_page_tensors(setting: str = "/sys/kernel/mm/transparent_hugepage/enabled") -> bool:
    """Whether torch's large tensors in host memory are made of huge pages, whose first use costs a
    small part of what 512 page faults do.

    Torch asks for them if ``THP_MEM_ALLOC_ENABLE=1`` is in the environment when it makes its first
    tensor; some systems give them to everybody.
    """
    try:
        with open(setting) as f:
            mode = f.read()
    except OSError:
        return False
    asked = os.environ.get("THP_MEM_ALLOC_ENABLE") == "1"
    return "[always]" in mode or (asked and "[madvise]" in mode)


def total_memory_bytes() -> int:
    """Memory this process may use: the machine's, or its control group's limit where that is
    lower.
    """
    total = int(psutil.virtual_memory().total)
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as f:
                text = f.read().strip()
        except OSError:
            continue
        if text.isdigit():
            return min(total, int(text))
    return total


def available_memory_bytes() -> int:
    """Memory this process could take now without others being swapped out, within its control
    group.
    """
    available = int(psutil.virtual_memory().available)
    return min(available, total_memory_bytes())
