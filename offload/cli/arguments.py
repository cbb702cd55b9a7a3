"""The arguments and options that commands share, and the kinds of values they take.

What a value may be is checked where it is given, so that a mistake is told as one before anything
is measured.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from offload.system.files import expect_writable
from offload.units import parse_bytes

__all__ = [
    "OUTPUT_FILE",
    "SIZE",
    "SIZE_OR_AUTO",
    "Number",
    "device",
    "disk_dir",
    "engine",
    "json_format",
    "of_a_run",
    "of_a_session",
    "quiet",
    "seed",
    "target",
    "threads",
]

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MOST_THREADS = 1024  # more than any machine of today has use for, and fewer than the system allows
_MOST_SEED = (1 << 32) - 1


class _Size(click.ParamType):  # type: ignore[type-arg]
    """Bytes as an int or as a text like 8GiB, or one of some words; stays the text it is."""

    name = "size"

    def __init__(self, *words: str) -> None:
        self._words = words

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        try:
            if value not in self._words:
                parse_bytes(value, param.opts[-1] if param is not None else "size")
        except (TypeError, ValueError) as error:
            raise click.UsageError(str(error), ctx) from None
        return value  # type: ignore[no-any-return]


class Number(click.FloatRange):
    """A finite number in a range."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is no finite number.", param, ctx)
        return number


class _OutputFile(click.ParamType):  # type: ignore[type-arg]
    """The path of a file that can be written; stays the text it is."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        try:
            expect_writable(value)
        except OSError as error:
            option = param.opts[-1] if param is not None else "file"
            told = f"{os.fspath(value)!r} cannot be written: {error.strerror}"
            raise click.UsageError(f"{told}; choose another {option}", ctx) from None
        return str(value)


SIZE = _Size()
SIZE_OR_AUTO = _Size("auto")
OUTPUT_FILE = _OutputFile()

target = click.argument("target")
disk_dir = click.option(
    "--disk-dir",
    metavar="DIR",
    help="Directory of the scratch file [$OFFLOAD_DIR, else the temporary directory].",
)
engine = click.option(
    "--engine", type=click.Choice(["native", "aio"]), help="Disk engine [native if built]."
)
device = click.option(
    "--device",
    metavar="NAME",
    help="Device whose activations are managed [the accelerator, else cpu].",
)
json_format = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document and nothing else."
)
quiet = click.option("--quiet", "-q", is_flag=True, help="Print the result only.")
_option = click.option(
    "--option",
    "-o",
    "options",
    metavar="NAME=VALUE",
    multiple=True,
    help="Option of the session, e.g. min_offload_bytes=256KiB. May be repeated.",
)
_host_budget = click.option(
    "--host-budget", type=SIZE, metavar="SIZE", help="Most bytes of host memory."
)
_disk_budget = click.option(
    "--disk-budget", type=SIZE, metavar="SIZE", help="Most bytes on the disk."
)
seed = click.option(
    "--seed",
    type=click.IntRange(0, _MOST_SEED),
    metavar="NUMBER",
    default=0,
    show_default=True,
    help="Of a workload's model and data.",
)
threads = click.option(
    "--threads",
    type=click.IntRange(1, _MOST_THREADS),
    metavar="NUMBER",
    help="Threads of torch [its default].",
)


def of_a_session(command: _Command) -> _Command:
    """The options of a session: ``disk_dir``, ``engine`` and ``options``."""
    return _together(disk_dir, engine, _option)(command)


def of_a_run(command: _Command) -> _Command:
    """A target, all options of the session it runs in, and how it runs."""
    budgets = (device, _host_budget, _disk_budget)
    return _together(target, of_a_session, *budgets, seed, threads)(command)


def _together(*decorators: Callable[[Any], Any]) -> Callable[[_Command], _Command]:
    def decorate(command: _Command) -> _Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate
