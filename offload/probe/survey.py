"""survey: look at a machine, measure what a session would use of it; and its rates alone, once."""

from __future__ import annotations

from collections.abc import Callable

from offload.config import Config
from offload.engines import native_is_built
from offload.probe.disk import (
    MIN_FILE_BYTES,
    Cell,
    DiskRates,
    fio_rates,
    measure_copy,
    measure_disk,
)
from offload.probe.facts import directory_facts, host_facts
from offload.probe.link import (
    LinkRates,
    accelerator_facts,
    measure_flops,
    measure_link,
)
from offload.probe.profile import MachineProfile, load_profile, save_profile
from offload.probe.verdicts import Survey
from offload.system.machine import indexed
from offload.system.pool import why_no_pool
from offload.units import MIB

__all__ = ["cells", "machine_profile", "passes", "survey"]

_QUICK = (Cell(4, 8 * MIB), Cell(2, 1 * MIB))
_FULL = tuple(Cell(t, b * MIB) for t in (1, 2, 4) for b in (1, 4, 8, 16))


def cells(config: Config, *, quick: bool) -> tuple[Cell, ...]:
    """The settings of the engine to measure: the session's own first."""
    own = Cell(config.io_threads, config.io_block_bytes)
    return (own, *(cell for cell in (_QUICK if quick else _FULL) if cell != own))


def passes(config: Config, *, quick: bool, with_fio: bool) -> int:
    """How often a survey calls ``advance``, at most."""
    return len(cells(config, quick=quick)) + (2 if with_fio else 0) + 3


def survey(
    config: Config,
    *,
    quick: bool = True,
    with_fio: bool = False,
    seconds: float | None = None,
    advance: Callable[[str], None] = lambda what: None,
) -> Survey:
    """Everything about the machine, ``config.disk_dir`` and ``config.device``.

    Args:
        config: whose directory, device and engine are looked at.
        quick: a few seconds, and fewer settings of the engine.
        with_fio: let fio measure the disk as well, where it is installed.
        seconds: length of one pass over the disk; None: 0.05 if quick, else 0.5.
        advance: called with its name before each thing that is measured.

    Raises:
        OSError: the directory cannot be used.
    """
    directory = directory_facts(config.disk_dir)
    file_bytes = min((256 if quick else 1024) * MIB, directory.free_bytes // 4)
    if config.disk_budget is not None:
        file_bytes = min(file_bytes, config.disk_budget)
    has_room = file_bytes >= MIN_FILE_BYTES
    seconds = seconds or (0.05 if quick else 0.5)
    disk: tuple[DiskRates, ...] = ()
    fio = None
    if has_room:
        disk = measure_disk(
            config.disk_dir, cells(config, quick=quick), file_bytes=file_bytes, seconds=seconds,
            rounds=3, engine=config.engine, advance=advance,
        )  # fmt: skip
    if has_room and with_fio:
        fio = fio_rates(
            config.disk_dir, block_bytes=config.io_block_bytes, file_bytes=file_bytes,
            seconds=4 * seconds, advance=advance,
        )  # fmt: skip
    advance("memory")
    copy_bytes_per_s = measure_copy(config.disk_dir, config.engine)
    advance("link")
    link = _link(config, quick=quick)
    advance("arithmetic")
    flops_per_s = measure_flops(config.device)
    return Survey(
        quick=quick,
        native=config.engine != "aio" and native_is_built(),
        host=host_facts(),
        directory=directory,
        disk=disk,
        fio=fio,
        accelerator=accelerator_facts(config.device),
        link=link,
        copy_bytes_per_s=copy_bytes_per_s,
        flops_per_s=flops_per_s,
        no_pool=why_no_pool() if config.device.type == "cpu" else "",
    )


def _link(config: Config, *, quick: bool) -> LinkRates | None:
    if config.device.type == "cpu":
        return None
    return measure_link(indexed(config.device), config.disk_dir, copies=8 if quick else 32)


def machine_profile(
    config: Config, *, refresh: bool = False, measure: Callable[[Config], Survey] = survey
) -> MachineProfile:
    """The rates of this machine, of a directory and of a device; measured once, in a few seconds.

    They are remembered below ``$XDG_CACHE_HOME`` for each file system and device.

    Args:
        config: whose ``disk_dir``, ``device`` and I/O setting count.
        refresh: measure again.
        measure: finds the rates that are not remembered.

    Raises:
        OSError: the directory refused to be measured.

    Example:
        >>> config = Config(disk_dir="/nvme/scratch", device="cpu")  # doctest: +SKIP
        >>> profile = machine_profile(config)  # doctest: +SKIP
        >>> profile.disk_write_bytes_per_s > 0, profile.link_out_bytes_per_s  # doctest: +SKIP
        (True, None)
    """
    profile = None if refresh else load_profile(config)
    if profile is None:
        profile = MachineProfile.of(measure(config))
        save_profile(config, profile)
    return profile.at(config.io_threads, config.io_block_bytes)
