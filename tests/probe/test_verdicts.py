"""Every rule, with the values that make it speak and those that do not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.probe.disk import DiskRates, FioRates
from offload.probe.link import PcieLink
from offload.probe.verdicts import Finding, Level, findings, hidden_from_width
from offload.units import GIB, MIB
from tests.probe.values import ACCELERATOR, DIRECTORY, HOST, LINK, RATES, survey_with


def only(found: list[Finding], *, containing: str) -> Finding:
    (one,) = [f for f in found if containing in f.text]
    return one


def test_a_good_machine_is_told_so_and_nothing_else() -> None:
    (found,) = findings(survey_with())
    assert found.level is Level.GOOD and found.fix == ""
    assert "5.00 GB/s written, 3.00 read" in found.text


def test_a_good_accelerator_is_told_so() -> None:
    told = findings(survey_with(accelerator=ACCELERATOR, link=LINK, flops_per_s=10e12))
    assert [f.level for f in told] == [Level.GOOD, Level.GOOD]
    assert "25.0 GB/s out, 25.0 in, 20.0 + 20.0 at once" in told[1].text


# What is changed of the good machine, and what is then said of it.
FAULTS = {
    "tmpfs": (
        {"directory": replace(DIRECTORY, in_memory=True, filesystem="tmpfs")},
        Level.BAD, "keeps files in memory", "OFFLOAD_DIR",
    ),
    "no direct I/O": (
        {"directory": replace(DIRECTORY, is_direct=False)},
        Level.WARNING, "no direct I/O", "ext4",
    ),
    "direct I/O refused by statx": (
        {"directory": replace(DIRECTORY, direct_offset_bytes=0)},
        Level.WARNING, "no direct I/O", "ext4",
    ),
    "hardly any room": (
        {"directory": replace(DIRECTORY, free_bytes=2 * GIB)},
        Level.WARNING, "2 GiB are free", "free some space",
    ),
    "less room than memory": (
        {"directory": replace(DIRECTORY, free_bytes=40 * GIB)},
        Level.NOTE, "40 GiB are free", "free some space",
    ),
    "no C++": ({"native": False}, Level.WARNING, "was not built", "compiler"),
    "another allocator": (
        {"no_pool": "the process takes its memory from libjemalloc.so"},
        Level.WARNING, "libjemalloc.so: the process hardly gets smaller", "without that",
    ),
    "no huge pages": (
        {"host": replace(HOST, huge_pages="never")},
        Level.WARNING, "switched off", "echo madvise",
    ),
    "a limit": (
        {"host": replace(HOST, cgroup_limit_bytes=8 * GIB)},
        Level.NOTE, "allows 8 GiB", "",
    ),
    "two nodes": ({"host": replace(HOST, numa_nodes=2)}, Level.NOTE, "2 NUMA nodes", "numactl"),
    "another setting is faster": (
        {"disk": (RATES, DiskRates(4, 16 * MIB, 8e9, 6e9, 3e9, 3e9))},
        Level.WARNING, "4 threads", "io_threads=4, io_block_bytes=16777216",
    ),
    "slower than fio": (
        {"fio": FioRates("fio-3", "psync", 5e9, 5e9)},
        Level.WARNING, "1.00 of fio's writes and 0.60", "io_threads",
    ),
    "as fast as fio": ({"fio": FioRates("fio-3", "psync", 5e9, 3e9)}, Level.GOOD, "fio", ""),
    "a slow disk": (
        {"disk": (DiskRates(2, 8 * MIB, 0.02e9, 0.02e9, 1e7, 1e7),)},
        Level.WARNING, "no GPT layer", "faster disk",
    ),
    "a spinning disk": (
        {
            "disk": (DiskRates(2, 8 * MIB, 0.02e9, 0.02e9, 1e7, 1e7),),
            "directory": replace(DIRECTORY, rotational=True),
        },
        Level.WARNING, "no GPT layer", "SSD",
    ),
    "a middling disk": (
        {"disk": (DiskRates(2, 8 * MIB, 0.2e9, 0.2e9, 1e8, 1e8),)},
        Level.NOTE, "width 1216 and more are hidden", "recompute",
    ),
    "not pinned": (
        {"accelerator": ACCELERATOR, "link": replace(LINK, pinned=False)},
        Level.BAD, "could not be pinned", "ulimit -l",
    ),
    "a narrow slot": (
        {"accelerator": replace(ACCELERATOR, pcie=PcieLink(4, 8, 4, 16)), "link": LINK},
        Level.WARNING, "PCIe 4 x8, and could on 4 x16", "slot",
    ),
    "a slow link": (
        {"accelerator": ACCELERATOR, "link": replace(LINK, out_bytes_per_s=10e9)},
        Level.WARNING, "of what PCIe 4 x16 carries", "NUMA",
    ),
    "no NVML": (
        {"accelerator": replace(ACCELERATOR, pcie=None, why_no_pcie="not found"), "link": LINK},
        Level.NOTE, "unknown: not found", "",
    ),
    "nodes with an accelerator": (
        {"accelerator": ACCELERATOR, "link": LINK, "host": replace(HOST, numa_nodes=2)},
        Level.NOTE, "device's node", "numactl",
    ),
    "a slow disk behind an accelerator": (
        {
            "accelerator": ACCELERATOR, "link": LINK,
            "disk": (DiskRates(2, 8 * MIB, 0.2e9, 0.2e9, 1e8, 1e8),),
        },
        Level.WARNING, "0.20 GB/s written", "faster disk",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_fix_told(name: str) -> None:
    changes, level, text, fix = FAULTS[name]
    found = only(findings(survey_with(**changes)), containing=text)
    assert found.level is level
    assert fix in found.fix and bool(found.fix) == bool(fix)
    assert text not in " ".join(f.text for f in findings(survey_with())) or level is Level.NOTE


def test_a_spinning_disk_that_is_fast_is_a_virtual_one() -> None:
    found = findings(survey_with(directory=replace(DIRECTORY, rotational=True)))
    assert all("SSD" not in f.fix for f in found)


def test_the_gravest_comes_first() -> None:
    bad = replace(DIRECTORY, in_memory=True)
    levels = [f.level for f in findings(survey_with(directory=bad, native=False))]
    assert levels[:2] == [Level.BAD, Level.WARNING]


def test_without_measurements_nothing_is_claimed() -> None:
    assert findings(survey_with(disk=(), flops_per_s=None, copy_bytes_per_s=None)) == []


@given(
    st.floats(1e9, 1e15), st.floats(1e7, 1e12), st.sampled_from([128, 2048, 65536]),
    st.sampled_from([2, 4]),
)  # fmt: skip
def test_hidden_width_is_where_computation_and_transfer_take_the_same(
    flops: float, rate: float, length: int, element_bytes: int
) -> None:
    """Worked out the other way round: seconds of both for one token, at that width and below."""
    width = hidden_from_width(flops, rate, length=length, element_bytes=element_bytes)

    def moves_in_time(width: int) -> bool:
        computes = (24 * width**2 + 2 * width * length) / flops
        return 16 * width * element_bytes / rate <= computes * (1 + 1e-9)

    assert moves_in_time(width)
    assert width == 64 or not moves_in_time(width - 64)


def test_a_faster_disk_hides_narrower_layers() -> None:
    widths = [
        hidden_from_width(1e12, rate, length=2048, element_bytes=4) for rate in (1e9, 2e9, 4e9, 8e9)
    ]
    assert widths == sorted(widths, reverse=True) and widths[0] > widths[-1]
