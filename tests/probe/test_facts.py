"""Facts, as read from the files of several machines."""

import os
from pathlib import Path

import pytest

from offload.probe.facts import directory_facts, host_facts
from offload.system.machine import total_memory_bytes

V2 = {"proc/self/cgroup": "0::/a/b\n"}
V1 = {"proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/a/b\n0::/\n"}


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({**V2, "sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
        ({**V2, "sys/fs/cgroup/a/b/memory.max": "4096\n"}, 4096),
        # A limit above counts as well, and the lowest holds.
        (
            {
                **V2,
                "sys/fs/cgroup/a/memory.max": "2048\n",
                "sys/fs/cgroup/a/b/memory.max": "4096\n",
            },
            2048,
        ),
        # In a container the group's path is the host's and its files lie at the top.
        ({**V2, "sys/fs/cgroup/memory.max": "8192\n"}, 8192),
        ({**V1, "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "4096\n"}, 4096),
        ({**V1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, None),
    ],
)
def test_limit_of_the_control_group(files, limit, root) -> None:
    assert host_facts(root(files)).cgroup_limit_bytes == limit


@pytest.mark.parametrize(
    ("text", "mode"),
    [("always [madvise] never", "madvise"), ("always madvise [never]", "never"), (None, None)],
)
def test_huge_pages(text, mode, root) -> None:
    files = {} if text is None else {"sys/kernel/mm/transparent_hugepage/enabled": text}
    assert host_facts(root(files)).huge_pages == mode


@pytest.mark.parametrize(("text", "nodes"), [("0\n", 1), ("0-3\n", 4), ("0,2-3\n", 3), ("", 1)])
def test_numa_nodes(text, nodes, root) -> None:
    assert host_facts(root({"sys/devices/system/node/has_memory": text})).numa_nodes == nodes


def test_processor_and_hugetlb(root) -> None:
    files = {
        "proc/cpuinfo": "processor : 0\nmodel name\t: Some CPU @ 2GHz\nmodel name\t: Other\n",
        "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "7\n",
    }
    facts = host_facts(root(files))
    assert (facts.cpu, facts.hugetlb_free) == ("Some CPU @ 2GHz", 7)
    assert host_facts(root({})).cpu in ("Some CPU @ 2GHz", "unknown")


def test_this_machine() -> None:
    facts = host_facts()
    assert facts.memory_bytes >= total_memory_bytes() > 0
    assert 0 < facts.cpus == len(os.sched_getaffinity(0))


def test_a_directory(tmp_path: Path) -> None:
    facts = directory_facts(str(tmp_path))
    assert facts.directory == str(tmp_path.resolve())
    assert facts.free_bytes > 0 and facts.source
    for alignment in (facts.direct_memory_bytes, facts.direct_offset_bytes):
        assert alignment is None or alignment & (alignment - 1) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_directory_is_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").symlink_to("a")
    assert directory_facts(str(tmp_path / "b")).directory == str(tmp_path.resolve() / "a")


@pytest.mark.parametrize(("text", "spins"), [("1\n", True), ("0\n", False)])
def test_a_partition_spins_as_its_disk_does(text, spins, root, tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    top = root({"sys/block/sda/queue/rotational": text, "sys/block/sda/sda1/size": "1\n"})
    (top / "sys/dev/block").mkdir(parents=True)
    name = f"{os.major(device)}:{os.minor(device)}"
    (top / "sys/dev/block" / name).symlink_to(top / "sys/block/sda/sda1")
    assert directory_facts(str(tmp_path), top).rotational is spins
    assert directory_facts(str(tmp_path), tmp_path).rotational is None


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        directory_facts(str(tmp_path / "none"))
