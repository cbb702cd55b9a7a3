"""What commands that run a target share: how it is loaded, and how its failures are told."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import torch

from offload.errors import OffloadError
from offload.failure import Failure
from offload.targets import Target, TargetError, load_target

__all__ = ["expect_writable", "guarded", "kept_out", "loaded", "told"]


def loaded(text: str, seed: int) -> Target:
    """The target of this name.

    Raises:
        click.UsageError: there is none.
        Failure: its own code failed.
    """
    try:
        return load_target(text, seed=seed)
    except TargetError as error:
        raise click.UsageError(str(error)) from None
    except (Exception, SystemExit) as error:
        raise Failure(f"the target {text!r} could not be loaded: {_told(error)}") from None


@contextlib.contextmanager
def told(target: Target) -> Iterator[None]:
    """Inside, what goes wrong while steps of ``target`` run is told in one line."""
    try:
        yield
    except click.ClickException:
        raise
    except (OffloadError, OSError) as error:
        raise Failure(str(error)) from None
    except (Exception, SystemExit) as error:
        raise _failure(target, error) from None


def guarded(target: Target, *, as_json: bool) -> Target:
    """The same target, for whoever has uses of its own for what this package raises.

    Of its step, what its own code raises is a ``Failure``, and what it prints stays out of a
    document.
    """

    def step() -> object:
        with kept_out(as_json):
            try:
                return target.step()
            except (OffloadError, click.ClickException):
                raise
            except (Exception, SystemExit) as error:
                raise _failure(target, error) from None

    return replace(target, step=step)


def kept_out(as_json: bool) -> contextlib.AbstractContextManager[object]:
    """Inside, what is printed does not get into the document that a command prints."""
    return contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext()


def expect_writable(file: Path, option: str) -> None:
    """Before minutes are spent on what could not be written.

    Raises:
        click.UsageError: it cannot.
    """
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise click.UsageError(f"{str(file)!r} cannot be written: choose another {option}")


def _failure(target: Target, error: BaseException) -> Failure:
    return Failure(f"a step of {target.name!r} failed: {_told(error)}")


def _told(error: BaseException) -> str:
    """An exception in one line, and where it was raised."""
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    here, inside = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    own = [f for f in frames if not f.filename.startswith((here, inside, "<"))]
    frame = (own or list(frames))[-1]  # there is one: this module's
    return f"{what} ({frame.filename}:{frame.lineno})"
