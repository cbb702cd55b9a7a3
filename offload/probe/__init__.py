"""Probe: what this machine, a directory and a device offer, read and measured, and what it means.

    facts.py      what is read: processor, memory, limits, the file system of a directory
    disk.py       rates of the disk through a session's engine, and of fio beside it
    link.py       rates of an accelerator's link, and what NVML says of it
    verdicts.py   what all that means for offloading, and what to do
    profile.py    the rates alone, remembered for the next time
    survey.py     everything above in one call

Planning and tuning take a ``MachineProfile`` as plain numbers.
"""

from __future__ import annotations

import os

import torch

from offload.config import Config
from offload.probe.disk import DiskRates
from offload.probe.profile import MachineProfile, machine_profile_by
from offload.probe.survey import survey
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


def machine_profile(
    config_or_dir: Config | str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    *,
    refresh: bool = False,
) -> MachineProfile:
    """The rates of this machine, of a directory and of a device; measured once, in a few seconds.

    They are remembered below ``$XDG_CACHE_HOME`` for each file system and device.

    Args:
        config_or_dir: whose ``disk_dir``, ``device`` and I/O setting count, or only a directory.
        device: in place of the config's.
        refresh: measure again.

    Raises:
        TypeError, ValueError: a directory or device that cannot be used.
        OSError: the directory refused to be measured.

    Example:
        >>> profile = machine_profile("/nvme/scratch", "cpu")  # doctest: +SKIP
        >>> profile.disk_write_bytes_per_s > 0, profile.link_out_bytes_per_s  # doctest: +SKIP
        (True, None)
    """
    if isinstance(config_or_dir, Config):
        config = config_or_dir if device is None else _with_device(config_or_dir, device)
    else:
        config = Config(disk_dir=config_or_dir, device=device)
    return machine_profile_by(survey, config, refresh=refresh)


def _with_device(config: Config, device: str | torch.device) -> Config:
    return Config(
        device=device, disk_dir=config.disk_dir, disk_budget=config.disk_budget,
        engine=config.engine, io_threads=config.io_threads, io_block_bytes=config.io_block_bytes,
    )  # fmt: skip
