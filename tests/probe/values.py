"""A machine without faults, to change one thing of."""

from dataclasses import replace
from typing import Any

from offload.probe.disk import DiskRates
from offload.probe.facts import DirectoryFacts, HostFacts
from offload.probe.link import AcceleratorFacts, LinkRates, PcieLink
from offload.probe.verdicts import Survey
from offload.units import GIB, MIB

HOST = HostFacts("a processor", 16, 64 * GIB, 60 * GIB, None, None, "madvise", 0, 1)
DIRECTORY = DirectoryFacts(
    "/nvme", "ext4", "/nvme", "/dev/nvme0n1", 500 * GIB, False, False, 512, 512, True
)
RATES = DiskRates(2, 8 * MIB, 5e9, 3e9, 2e9, 1.5e9)
LINK = LinkRates(25e9, 25e9, 20e9, 20e9, 1e-5, True)
ACCELERATOR = AcceleratorFacts("cuda:0", "a device", 80 * GIB, PcieLink(4, 16, 4, 16))


def survey_with(**changes: Any) -> Survey:
    """A machine that trains on its processor and has nothing to find fault with, but for
    ``changes``.
    """
    good = Survey(True, True, HOST, DIRECTORY, (RATES,), None, None, None, 15e9, 100e9)
    return replace(good, **changes)
