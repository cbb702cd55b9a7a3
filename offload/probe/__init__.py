"""Probe: what this machine, a directory and a device offer, read and measured, and what it means.

    facts.py      what is read: processor, memory, limits, the file system of a directory
    disk.py       rates of the disk through a session's engine, and of fio beside it
    link.py       rates of an accelerator's link, and what NVML says of it
    verdicts.py   what all that means for offloading, and what to do
    profile.py    the rates alone, remembered for the next time
    survey.py     everything above in one call, and what is remembered of it

Planning and tuning take a ``MachineProfile`` as plain numbers.
"""

from offload.probe.disk import DiskRates
from offload.probe.profile import MachineProfile
from offload.probe.survey import machine_profile, survey
from offload.probe.verdicts import Finding, Survey, best_rates, findings

__all__ = [
    "DiskRates",
    "Finding",
    "MachineProfile",
    "Survey",
    "best_rates",
    "findings",
    "machine_profile",
    "survey",
]
