"""The terminal: what commands print, and where to.

Results go to standard output, everything else to standard error: progress, warnings, errors, and
whatever a target prints. What cannot be written ends a command in one line.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import errno
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

import click
from rich.console import Console
from rich.progress import Progress, ProgressColumn

from offload.cli.failure import Failure
from offload.errors import OffloadWarning
from offload.report.tables import UNWRAPPED_COLUMNS, width_of
from offload.system.files import write_whole
from offload.system.interrupts import interrupts_kept, stop_if_interrupted

__all__ = [
    "kept_out",
    "one_line",
    "opened",
    "print_json",
    "progress",
    "results",
    "save",
    "unwritten",
    "warn",
]


class OutputLost(Failure):
    """Standard output takes no more."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}")


class _ReaderGone(OutputLost):
    exit_code = 128 + 13  # what a shell says of a process that SIGPIPE ended

    def show(self, file: Any = None) -> None:
        pass


def _escaped(error: UnicodeError) -> tuple[str | bytes, int]:
    """What cannot be encoded: as the bytes it was decoded from, else by its number."""
    for handler in ("surrogateescape", "backslashreplace"):
        with contextlib.suppress(UnicodeError):
            return codecs.lookup_error(handler)(error)
    raise error


_HANDLER = "offload.escaped"
codecs.register_error(_HANDLER, _escaped)
_CLOSED = OSError(errno.EBADF, os.strerror(errno.EBADF))
_UNDECODED = re.compile("[\udc80-\udcff]")


class _Stream:
    """A standard stream that survives what is behind it.

    Args:
        stream: what is written to; ``None``: it was closed when the process began.
        lost: called with the error whenever something cannot be written, from the first time on.
    """

    def __init__(self, stream: TextIO | None, lost: Callable[[OSError], object]) -> None:
        self._stream = stream if stream is not None else open(os.devnull, "w")  # noqa: SIM115
        self._error = None if stream is not None else _CLOSED
        self._lost = lost

    def write(self, text: str) -> int:
        self._attempt(self._written, text)
        return len(text)

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[..., object], *arguments: str) -> None:
        if self._error is None:
            try:
                act(*arguments)
            except OSError as error:
                self._give_up(error)
            except ValueError:  # somebody closed it
                self._give_up(_CLOSED)
        if self._error is not None:
            self._lost(self._error)

    def _written(self, text: str) -> None:
        coding = self._stream.encoding or "utf-8"
        if _UNDECODED.search(text):  # names of files, which go as the bytes they are
            self._stream.flush()
            self._stream.buffer.write(text.encode(coding, _HANDLER))
            self._stream.buffer.flush()
            return
        try:
            self._stream.write(text)
        except UnicodeEncodeError:
            self._stream.write(text.encode(coding, _HANDLER).decode(coding))

    def _give_up(self, error: OSError) -> None:
        self._error = error
        with contextlib.suppress(OSError, ValueError):
            # Else Python would write what is left at its end, and complain.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def opened() -> Iterator[None]:
    """Inside, standard streams may fail, warnings are told in a line each, once, and an interrupt
    is not lost.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # a file of ours would get its number, and what is printed
            os.open(os.devnull, os.O_RDWR)

    def lost(error: OSError) -> None:
        raise (_ReaderGone if error.errno == errno.EPIPE else OutputLost)(error) from None

    out, err = sys.stdout, sys.stderr
    with _warnings_told(), interrupts_kept():
        sys.stdout = cast(TextIO, _Stream(out, lost))
        sys.stderr = cast(TextIO, _Stream(err, lambda error: None))
        try:
            yield
        finally:
            sys.stdout, sys.stderr = out, err


@contextlib.contextmanager
def _warnings_told() -> Iterator[None]:
    told: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int,
        file: object = None, line: object = None,
    ) -> None:  # fmt: skip
        text = one_line(str(message))
        if not issubclass(category, OffloadWarning):
            text = f"{category.__name__}: {text} ({filename}:{lineno})"
        if text not in told:
            told.add(text)
            warn(text)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


@contextlib.contextmanager
def kept_out() -> Iterator[None]:
    """Inside, whatever is printed, also by C code and other processes, goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def results(*, quiet: bool = False, wrapped: bool = True) -> Console:
    """The console for results, which shows text as it stands.

    Args:
        quiet: it shows nothing.
        wrapped: its lines are no longer than the terminal's.
    """
    width = width_of(sys.stdout) if wrapped else UNWRAPPED_COLUMNS
    return Console(width=width, height=1, quiet=quiet, highlight=False, markup=False, emoji=False)


class _Progress(Progress):
    def update(self, *args: Any, **kwargs: Any) -> None:
        stop_if_interrupted()
        super().update(*args, **kwargs)


def progress(*columns: ProgressColumn, quiet: bool) -> Progress:
    """A display of what is going on, on a terminal, that goes away in the end."""
    console = Console(stderr=True, width=width_of(sys.stderr), highlight=False)
    return _Progress(
        *columns, console=console, transient=True, disable=quiet or not console.is_terminal
    )


def save(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file, whole or not at all.

    Raises:
        Failure: that could not be done.
    """
    try:
        write_whole(path, data)
    except OSError as error:
        raise unwritten(path, error) from None


def unwritten(path: str | os.PathLike[str], error: OSError) -> Failure:
    """What is told of an error that ``write_whole`` raised."""
    return Failure(f"{os.fspath(error.filename or path)} cannot be written: {error.strerror}")


def print_json(document: Any) -> None:
    """A result as one JSON document."""
    click.echo(json.dumps(document))


def warn(text: str) -> None:
    """Tell something on standard error."""
    click.echo(f"Warning: {text}", err=True)


def one_line(text: str) -> str:
    r"""``text`` without its line breaks.

    Example:
        >>> one_line("wrong shape:\n  [2, 3]")
        'wrong shape: [2, 3]'
    """
    return " ".join(text.split())
