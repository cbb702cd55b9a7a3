"""Setting: the options that tuning chooses, and the grid of those worth looking at."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import accumulate, product
from typing import Any

from offload.config import Config
from offload.probe import MachineProfile, best_rates
from offload.tuner.record import StepRecord
from offload.units import MIB

__all__ = ["Setting", "grid"]

_LEAST_WINDOW_BYTES = MIB  # of steps that save many times as much
_WINDOWS = (1 / 64, 1 / 32, 1 / 16, 1 / 8)  # of all bytes that could leave
_PREFETCHES = (1 / 64, 1 / 32, 1 / 16, 1 / 8)
_KEPT = (0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4)
_MOST_TOUCHES = 1_000_000  # replayed in all, at some microseconds each
_BELOW = (1 / 100, 1 / 10, 1 / 3)


@dataclass(frozen=True)
class Setting:
    """What a session is given; see ``Config`` for the meaning of each."""

    min_offload_bytes: int
    window_bytes: int
    prefetch_bytes: int
    keep_last_bytes: int
    io_threads: int
    io_block_bytes: int

    @classmethod
    def of(cls, config: Config) -> Setting:
        """Those of a config."""
        return cls(**{name: getattr(config, name) for name in cls.__dataclass_fields__})

    def options(self) -> dict[str, Any]:
        """By name, as ``Session`` takes them; each storage moves by itself, as in a replay."""
        return {**asdict(self), "bundle_bytes": 0}


def grid(record: StepRecord, config: Config, profile: MachineProfile) -> list[Setting]:
    """Settings in proportion to what the step saves, the config's own among them.

    Thresholds stand between the sizes that occur; windows and what is kept are shares of all bytes
    that could leave. Where bytes go to the disk, the best setting that was measured of the engine
    is another choice. Long steps, whose replay takes longer, get a coarser grid.
    """
    total_bytes = record.movable_bytes
    least_bytes = max(4096, min(_LEAST_WINDOW_BYTES, total_bytes // 32))

    def shares(parts: tuple[float, ...], own_bytes: int, floor_bytes: int) -> list[int]:
        sizes = {_rounded(total_bytes * part, floor_bytes) for part in parts}
        return sorted({*sizes, own_bytes} if own_bytes < total_bytes else sizes)

    settings = [
        Setting(threshold, window, prefetch, kept, *engine)
        for threshold, window, prefetch, kept, engine in product(
            thresholds(record, config),
            shares(_WINDOWS, config.window_bytes, least_bytes),
            shares(_PREFETCHES, config.prefetch_bytes, least_bytes),
            shares(_KEPT, config.keep_last_bytes, 0),
            _engines(config, profile),
        )
    ]
    count = max(1, _MOST_TOUCHES // max(1, len(record.touches)))
    if len(settings) > count:  # a random part: every stride would miss whole values
        settings = random.Random(0).sample(settings, count)
    own = Setting.of(config)
    return [own, *(s for s in settings if s != own)]


def _rounded(nbytes: float, floor_bytes: int) -> int:
    unit = MIB if nbytes >= 4 * MIB else 4096
    return max(floor_bytes, round(nbytes / unit) * unit)


def thresholds(record: StepRecord, config: Config) -> list[int]:
    """A few values of ``min_offload_bytes`` that differ in what they let leave: those below which
    about a hundredth, a tenth and a third of the bytes are, and the config's own.
    """
    sizes = sorted(b.nbytes for b in record.blocks if b.movable and not b.held)
    below_bytes = list(accumulate(sizes))
    cuts = (bisect_right(below_bytes, share * below_bytes[-1]) for share in _BELOW)
    return sorted({config.min_offload_bytes, *(sizes[cut] for cut in cuts)})


def _engines(config: Config, profile: MachineProfile) -> list[tuple[int, int]]:
    own = (config.io_threads, config.io_block_bytes)
    if config.device.type != "cpu" or not profile.disk_rates:
        return [own]
    best = best_rates(profile.disk_rates)
    return sorted({own, (best.io_threads, best.io_block_bytes)})
