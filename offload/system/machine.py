"""What this machine offers to this process: memory, processors, devices, and the file system that
a directory is on.
"""

import os
import re
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import torch

from offload.units import MAX_BYTES

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


def local_processes() -> int:
    """How many processes share this machine, as launchers such as torchrun say.

    Raises:
        ValueError: ``$LOCAL_WORLD_SIZE`` is no number.
    """
    text = os.environ.get("LOCAL_WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(
            f"$LOCAL_WORLD_SIZE is {text!r}, not a number of processes on this machine: "
            "unset it, or set it to that number"
        )
    return int(text)


class _Group(NamedTuple):
    """One control group above this process, as far as it limits memory."""

    limit_bytes: int
    used_bytes: int  # without what the kernel would give up first


def total_memory_bytes(root: str = "/") -> int:
    """Memory this process may use: the machine's, or the least that a control group above it
    allows.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    total_bytes = int(psutil.virtual_memory().total)
    return min(total_bytes, memory_limit_bytes(root) or total_bytes)


def memory_limit_bytes(root: str = "/") -> int | None:
    """The least that a control group above this process allows; ``None``: none has a limit."""
    return min((group.limit_bytes for group in _control_groups(root)), default=None)


def available_memory_bytes(root: str = "/") -> int:
    """Memory this process could take now without others being swapped out, within its control
    groups.
    """
    rooms = [max(0, group.limit_bytes - group.used_bytes) for group in _control_groups(root)]
    return min([int(psutil.virtual_memory().available), *rooms])


def _control_groups(root: str) -> Iterator[_Group]:
    """The groups of this process, from its own to the topmost, that have a limit."""
    for line in text_in(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            top, names = "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = path.strip("/").split("/")
        for depth in range(len(parts), -1, -1):  # in a container only the topmost may be there
            group = _control_group(os.path.join(root, top, *parts[:depth]), *names)
            if group is not None:
                yield group


def _control_group(directory: str, limit: str, usage: str, inactive: str) -> _Group | None:
    limit_text = text_in(os.path.join(directory, limit))
    # "max", or none of this name; version 1 says "no limit" by a huge number.
    if not limit_text.isdigit() or int(limit_text) >= MAX_BYTES:
        return None
    used_text = text_in(os.path.join(directory, usage))
    used_bytes = int(used_text) if used_text.isdigit() else 0
    for line in text_in(os.path.join(directory, "memory.stat")).splitlines():
        name, _, count = line.partition(" ")
        if name == inactive:
            used_bytes -= int(count)
    return _Group(int(limit_text), max(0, used_bytes))


def indexed(device: torch.device) -> torch.device:
    """``device`` with its number: the current one of its kind where it has none."""
    index: int | None = device.index
    if device.type == "cpu" or index is not None:
        return device
    return torch.device(device.type, torch.accelerator.current_device_index())


def cpus_near_pci_device(address: str, root: str = "/") -> set[int]:
    """The processors of the NUMA node that a PCI device hangs on.

    Empty where there is but one node, or where the kernel does not tell.

    Args:
        address: as the kernel writes it, ``"0000:3b:00.0"``.
        root: where ``sys`` lies.
    """
    nodes = os.path.join(root, "sys/devices/system/node")
    names = os.listdir(nodes) if os.path.isdir(nodes) else []
    if sum(re.fullmatch(r"node\d+", name) is not None for name in names) < 2:
        return set()
    device = os.path.join(root, "sys/bus/pci/devices", address.lower())
    node = text_in(os.path.join(device, "numa_node"))  # -1: not known
    return numbers_in(text_in(os.path.join(nodes, f"node{node}/cpulist")))


def numbers_in(text: str) -> set[int]:
    """What a list of the kernel's names.

    Example:
        >>> numbers_in("0-2,8")
        {0, 1, 2, 8}
    """
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first:
            found.update(range(int(first), int(last or first) + 1))
    return found


def text_in(path: str | os.PathLike[str]) -> str:
    """What a file of the kernel's says, without its last line break; nothing if there is none."""
    try:
        with open(path, errors="surrogateescape") as f:  # names of groups may be any bytes
            return f.read().rstrip("\n")
    except OSError:
        return ""
