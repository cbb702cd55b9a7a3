"""Limits of control groups and NUMA nodes, read from a tree of files like the kernel's."""

from pathlib import Path

import psutil
import pytest

from offload.system.machine import available_memory_bytes, cpus_near_pci_device, total_memory_bytes

MACHINE_BYTES = int(psutil.virtual_memory().total)


def write(root: Path, **files: str) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def group(root: Path, directory: str, limit: str, used: int = 0, inactive: int = 0) -> None:
    write(
        root / directory,
        **{
            "memory.max": f"{limit}\n",
            "memory.current": f"{used}\n",
            "memory.stat": f"anon 1\ninactive_file {inactive}\nactive_file 7\n",
        },
    )


def test_the_least_limit_above_a_process_counts(tmp_path: Path) -> None:
    root = write(tmp_path, **{"proc/self/cgroup": "0::/jobs/train/rank\n"})
    top = "sys/fs/cgroup"
    group(tmp_path, f"{top}/jobs", "3000", used=2500, inactive=500)
    group(tmp_path, f"{top}/jobs/train", "2000", used=100)
    group(tmp_path, f"{top}/jobs/train/rank", "max", used=100)
    assert total_memory_bytes(root) == 2000
    assert available_memory_bytes(root) == 1000, "what is cached and idle is there to be taken"


def test_in_a_container_the_path_may_not_be_visible(tmp_path: Path) -> None:
    root = write(tmp_path, **{"proc/self/cgroup": "0::/outside/of/here\n"})
    group(tmp_path, "sys/fs/cgroup", "5000", used=6000)
    assert total_memory_bytes(root) == 5000
    assert available_memory_bytes(root) == 0


def test_version_one(tmp_path: Path) -> None:
    lines = "5:cpu,cpuacct:/job\n4:memory:/job\n1:name=systemd:/\n"
    root = write(tmp_path, **{"proc/self/cgroup": lines})
    write(
        tmp_path / "sys/fs/cgroup/memory/job",
        **{
            "memory.limit_in_bytes": "4000",
            "memory.usage_in_bytes": "1500",
            "memory.stat": "cache 1\ntotal_inactive_file 500\n",
        },
    )
    assert total_memory_bytes(root) == 4000
    assert available_memory_bytes(root) == 3000


def test_no_group_or_no_limit(tmp_path: Path) -> None:
    assert total_memory_bytes(str(tmp_path)) == MACHINE_BYTES
    root = write(tmp_path, **{"proc/self/cgroup": "0::/\n"})
    group(tmp_path, "sys/fs/cgroup", "max")
    assert total_memory_bytes(root) == MACHINE_BYTES


GPU = "0000:3b:00.0"


def nodes(root: Path, *cpu_lists: str) -> None:
    for i, cpus in enumerate(cpu_lists):
        write(root, **{f"sys/devices/system/node/node{i}/cpulist": f"{cpus}\n"})


def test_processors_near_a_device(tmp_path: Path) -> None:
    nodes(tmp_path, "0-2,8", "3-7")
    root = write(tmp_path, **{f"sys/bus/pci/devices/{GPU}/numa_node": "1\n"})
    assert cpus_near_pci_device(GPU.upper(), root) == {3, 4, 5, 6, 7}
    write(tmp_path, **{f"sys/bus/pci/devices/{GPU}/numa_node": "0\n"})
    assert cpus_near_pci_device(GPU, root) == {0, 1, 2, 8}


@pytest.mark.parametrize("node", ["-1", ""])
def test_a_device_whose_node_is_not_known(tmp_path: Path, node: str) -> None:
    nodes(tmp_path, "0-3", "4-7")
    root = write(tmp_path, **{f"sys/bus/pci/devices/{GPU}/numa_node": node})
    assert cpus_near_pci_device(GPU, root) == set()
    assert cpus_near_pci_device("0000:ff:00.0", root) == set()


def test_one_node_makes_no_difference(tmp_path: Path) -> None:
    nodes(tmp_path, "0-7")
    root = write(tmp_path, **{f"sys/bus/pci/devices/{GPU}/numa_node": "0\n"})
    assert cpus_near_pci_device(GPU, root) == set()
    assert cpus_near_pci_device(GPU, str(tmp_path / "nothing")) == set()
