"""``offload probe``: the machine as a session would find it, with verdicts."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from offload.cli import arguments, terminal
from offload.cli.arguments import Number
from offload.cli.failure import Failure, mistakes_told
from offload.config import Config
from offload.probe.profile import MachineProfile, save_profile
from offload.probe.survey import passes, survey
from offload.probe.verdicts import Finding, Level, Survey, findings
from offload.report.tables import FigureTable, Prose
from offload.units import format_bytes, format_seconds

__all__ = ["command"]

JSON_FORMAT = 1
_STYLES = {Level.GOOD: "green", Level.NOTE: "cyan", Level.WARNING: "yellow", Level.BAD: "bold red"}


@click.command("probe")
@click.argument("directory", metavar="[DIR]", required=False, type=click.Path())
@arguments.device
@arguments.engine
@click.option("--quick", is_flag=True, help="A few seconds: fewer settings, shorter passes.")
@click.option(
    "--seconds",
    type=Number(min=0, min_open=True, max=600),
    metavar="SECONDS",
    help="Length of one pass [0.5; with --quick 0.05].",
)
@click.option("--no-fio", is_flag=True, help="Do not compare with fio.")
@arguments.json_format
@arguments.quiet
def command(
    directory: str | None,
    device: str | None,
    engine: Literal["native", "aio"] | None,
    quick: bool,
    seconds: float | None,
    no_fio: bool,
    as_json: bool,
    quiet: bool,
) -> None:
    """Say what this machine is fit for.

    DIR is where the scratch file would lie: by default $OFFLOAD_DIR, else the temporary directory.
    The rates are remembered for "offload tune" and "offload.plan". Exit status: 0; 1 if offloading
    there would not do what it is for; 2 for wrong usage; 3 if something could not be measured.
    """
    with mistakes_told():
        config = Config(disk_dir=directory, device=device, engine=engine)
    with_fio = not no_fio
    try:
        total = passes(config, quick=quick, with_fio=with_fio)
        with _bar(total, quiet=quiet or as_json) as advance:
            found = survey(config, quick=quick, with_fio=with_fio, seconds=seconds, advance=advance)
    except (OSError, RuntimeError, ImportError) as error:
        raise Failure(f"{config.disk_dir} could not be measured: {error}") from None
    verdicts = findings(found)
    profile = MachineProfile.of(found)
    path = save_profile(config, profile)
    if as_json:
        terminal.print_json(_document(found, profile, verdicts))
    else:
        _report(found, verdicts, path, asked_for_fio=with_fio, quiet=quiet)
    sys.exit(1 if any(v.level is Level.BAD for v in verdicts) else 0)


@contextmanager
def _bar(total: int, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A progress bar; gives the function that moves it on."""
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    with terminal.progress(*columns, TimeElapsedColumn(), quiet=quiet) as progress:
        task = progress.add_task("", total=total)
        yield lambda what: progress.update(task, advance=1, description=what)


def _report(
    found: Survey, verdicts: list[Finding], path: Path | None, *, asked_for_fio: bool, quiet: bool
) -> None:
    tables = terminal.results(quiet=quiet)
    tables.print(_facts(found))
    if found.disk:
        tables.print(_disk(found, asked_for_fio=asked_for_fio))
    if found.accelerator is not None:
        tables.print(_accelerator(found))
    _print_verdicts(terminal.results(wrapped=not quiet), verdicts, found)
    if path is not None:
        tables.print(Prose(f"The rates are kept in {path}", style="dim"))


def _document(found: Survey, profile: MachineProfile, verdicts: list[Finding]) -> dict[str, Any]:
    told = [{"level": v.level.value, "text": v.text, "fix": v.fix} for v in verdicts]
    return {
        "format": JSON_FORMAT, **asdict(found), "profile": profile.to_dict(), "findings": told,
    }  # fmt: skip


def _facts(found: Survey) -> FigureTable:
    host, directory = found.host, found.directory
    alignment = "not told by this kernel"
    if directory.direct_offset_bytes is not None:
        alignment = (
            f"{directory.direct_memory_bytes} bytes of memory, {directory.direct_offset_bytes} of "
            "offsets"
        )
    limit = host.cgroup_limit_bytes
    locked = host.memlock_bytes
    flops = "" if found.flops_per_s is None else f"{found.flops_per_s / 1e12:.3g} TFLOP/s"
    copied = "" if found.copy_bytes_per_s is None else f"{found.copy_bytes_per_s / 1e9:.1f} GB/s"
    rows = {
        "processor": f"{host.cpu}, {host.cpus} usable; NUMA nodes: {host.numa_nodes}",
        "memory": f"{format_bytes(host.memory_bytes)}, "
        f"{format_bytes(host.available_bytes)} available",
        "control group": "no limit" if limit is None else format_bytes(limit),
        "lockable memory": "no limit" if locked is None else format_bytes(locked),
        "huge pages": f"{host.huge_pages or 'none'}; {host.hugetlb_free} reserved ones free",
        "directory": directory.directory,
        "file system": f"{directory.filesystem} of {directory.source}, "
        f"{format_bytes(directory.free_bytes)} free",
        "direct I/O": f"{'yes' if directory.is_direct else 'no'}, alignment: {alignment}",
        "copies in memory": copied,
        "matrix products": flops,
    }
    return FigureTable.of_facts("Machine", rows)


def _disk(found: Survey, *, asked_for_fio: bool) -> FigureTable:
    table = FigureTable(title="Disk, GB/s")
    table.add_figures("threads", "block", "write", "read", "both: write", "read")
    for r in found.disk:
        rates = (
            r.write_bytes_per_s, r.read_bytes_per_s, r.duplex_write_bytes_per_s,
            r.duplex_read_bytes_per_s,
        )  # fmt: skip
        table.add_row(
            str(r.io_threads), format_bytes(r.io_block_bytes), *(f"{v / 1e9:.2f}" for v in rates)
        )
    if found.fio is not None:
        fio = found.fio
        table.add_section()
        written, read = fio.write_bytes_per_s / 1e9, fio.read_bytes_per_s / 1e9
        table.add_row(fio.version, fio.engine, f"{written:.2f}", f"{read:.2f}")
    elif asked_for_fio:
        why = "fio could not run there" if shutil.which("fio") else "fio is not installed"
        table.caption = f"{why}: nothing to compare with"
    return table


def _accelerator(found: Survey) -> FigureTable:
    device, link = found.accelerator, found.link
    assert device is not None
    size = "" if device.memory_bytes is None else f", {format_bytes(device.memory_bytes)}"
    rows = {"device": f"{device.device}, {device.name}{size}"}
    if device.pcie is not None:
        rows["PCIe"] = f"generation {device.pcie.generation}, x{device.pcie.width}"
    if link is not None:
        rows["out, in"] = _pair(link.out_bytes_per_s, link.in_bytes_per_s)
        rows["out, in at once"] = _pair(link.duplex_out_bytes_per_s, link.duplex_in_bytes_per_s)
        rows["latency of a copy"] = format_seconds(link.latency_seconds)
    return FigureTable.of_facts("Accelerator", rows)


def _pair(a: float, b: float) -> str:
    return f"{a / 1e9:.1f}, {b / 1e9:.1f} GB/s"


def _print_verdicts(console: Console, verdicts: list[Finding], found: Survey) -> None:
    if not found.disk:
        warning = (Level.WARNING.value, _STYLES[Level.WARNING])
        told = Text.assemble(warning, "  too little free space to measure the disk")
        console.print(Prose(told))
    for verdict in verdicts:
        level = (f"{verdict.level.value:8}", _STYLES[verdict.level])
        console.print(Prose(Text.assemble(level, f" {verdict.text}")))
        if verdict.fix:
            console.print(Prose(f"         {verdict.fix}", style="dim"))
