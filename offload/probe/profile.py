"""MachineProfile: the rates of one machine, directory and device, measured once and remembered.

[Note: the cache is only a cache] One JSON file for each file system and device, below
``$XDG_CACHE_HOME`` (else ``~/.cache``). A file that is missing, broken, of another format, of
another machine or too old is measured again and replaced; one that cannot be written is done
without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from offload.config import Config
from offload.probe.disk import DiskRates
from offload.probe.verdicts import Survey
from offload.system.files import write_whole
from offload.system.machine import indexed
from offload.units import SECONDS_PER_DAY

__all__ = ["FORMAT", "MachineProfile", "cache_path", "load_profile", "save_profile"]

FORMAT = 1
MAX_AGE_SECONDS = 30 * SECONDS_PER_DAY


@dataclass(frozen=True)
class MachineProfile:
    """What this machine moves and computes, in bytes and operations per second.

    Rates are None for what is not there: no link without an accelerator, no disk where nothing
    could be measured. *duplex* rates are with the other direction running beside.

    Attributes:
        disk_write_bytes_per_s: by the engine at the session's ``io_threads``, ``io_block_bytes``.
        disk_read_bytes_per_s: likewise.
        disk_duplex_write_bytes_per_s: likewise.
        disk_duplex_read_bytes_per_s: likewise.
        link_out_bytes_per_s: from the device to pinned host memory.
        link_in_bytes_per_s: back.
        link_duplex_out_bytes_per_s: likewise.
        link_duplex_in_bytes_per_s: likewise.
        link_latency_seconds: what a copy over the link takes beyond its bytes.
        copy_bytes_per_s: within host memory, by the engine.
        flops_per_s: of matrix products, float32 on the CPU, bfloat16 elsewhere.
        disk_rates: all settings of the engine that were measured.
    """

    disk_write_bytes_per_s: float | None = None
    disk_read_bytes_per_s: float | None = None
    disk_duplex_write_bytes_per_s: float | None = None
    disk_duplex_read_bytes_per_s: float | None = None
    link_out_bytes_per_s: float | None = None
    link_in_bytes_per_s: float | None = None
    link_duplex_out_bytes_per_s: float | None = None
    link_duplex_in_bytes_per_s: float | None = None
    link_latency_seconds: float | None = None
    copy_bytes_per_s: float | None = None
    flops_per_s: float | None = None
    disk_rates: tuple[DiskRates, ...] = ()

    @classmethod
    def of(cls, survey: Survey) -> MachineProfile:
        """The rates of a survey, those of the disk in its first setting."""
        link = survey.link
        profile = cls(
            link_out_bytes_per_s=link.out_bytes_per_s if link else None,
            link_in_bytes_per_s=link.in_bytes_per_s if link else None,
            link_duplex_out_bytes_per_s=link.duplex_out_bytes_per_s if link else None,
            link_duplex_in_bytes_per_s=link.duplex_in_bytes_per_s if link else None,
            link_latency_seconds=link.latency_seconds if link else None,
            copy_bytes_per_s=survey.copy_bytes_per_s,
            flops_per_s=survey.flops_per_s,
            disk_rates=survey.disk,
        )
        if not survey.disk:
            return profile
        first = survey.disk[0]
        return profile.at(first.io_threads, first.io_block_bytes)

    def at(self, io_threads: int, io_block_bytes: int) -> MachineProfile:
        """The same with the disk's rates in this setting, or the nearest that was measured.

        Example:
            >>> rates = (DiskRates(2, 8 << 20, 5e9, 2e9, 2e9, 1e9),
            ...          DiskRates(1, 8 << 20, 3e9, 2e9, 2e9, 1e9))
            >>> MachineProfile(disk_rates=rates).at(1, 4 << 20).disk_write_bytes_per_s
            3000000000.0
        """
        if not self.disk_rates:
            return self

        def distance(rates: DiskRates) -> float:
            threads = abs(math.log2(rates.io_threads / io_threads))
            return 8 * threads + abs(math.log2(rates.io_block_bytes / io_block_bytes))

        near = min(self.disk_rates, key=distance)
        return replace(
            self,
            disk_write_bytes_per_s=near.write_bytes_per_s,
            disk_read_bytes_per_s=near.read_bytes_per_s,
            disk_duplex_write_bytes_per_s=near.duplex_write_bytes_per_s,
            disk_duplex_read_bytes_per_s=near.duplex_read_bytes_per_s,
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> MachineProfile:
        """The profile that ``to_dict`` made these of.

        Raises:
            ValueError: they are no such values.
        """
        try:
            rates = tuple(DiskRates(**r) for r in values["disk_rates"])
            profile = cls(**{**values, "disk_rates": rates})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"no profile of a machine: {error}") from None
        numbers = [getattr(profile, n) for n in cls.__dataclass_fields__ if n != "disk_rates"]
        numbers += [value for r in rates for value in asdict(r).values()]
        for value in numbers:
            plain = value is None or (isinstance(value, int | float) and math.isfinite(value))
            if not plain or (value is not None and value < 0):
                raise ValueError(f"no profile of a machine: {value!r} is no rate")
        return profile


def cache_path(config: Config) -> Path:
    """Where the profile for this directory and device is kept."""
    key = json.dumps(_key(config), sort_keys=True)
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return Path(base).expanduser() / "offload" / f"machine-{name}.json"


def _key(config: Config) -> dict[str, Any]:
    device = indexed(config.device)
    name = str(device)
    with contextlib.suppress(AttributeError, RuntimeError):  # not every backend has properties
        name += f" {torch.get_device_module(device).get_device_properties(device.index).name}"
    return {
        "machine": platform.node(),
        "kernel": platform.release(),
        "filesystem": os.stat(config.disk_dir).st_dev,
        "device": name,
        "cpus": len(os.sched_getaffinity(0)),
        "engine": config.engine,
    }


def load_profile(config: Config) -> MachineProfile | None:
    """What is remembered. See [Note: the cache is only a cache]."""
    try:
        document = json.loads(cache_path(config).read_text())
        if document["format"] != FORMAT or document["key"] != _key(config):
            return None
        if not 0 <= time.time() - document["measured_at"] < MAX_AGE_SECONDS:
            return None
        return MachineProfile.from_dict(document["profile"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def save_profile(config: Config, profile: MachineProfile) -> Path | None:
    """Remember ``profile``; returns where, or None where that could not be done."""
    path = cache_path(config)
    document = {
        "format": FORMAT, "key": _key(config), "measured_at": time.time(),
        "profile": profile.to_dict(),
    }  # fmt: skip
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(document))  # also beside another process that does the same
    except OSError:
        return None
    return path
