"""What commands that run a target share: how it is loaded, and how its failures are told."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path

import click
import torch

from offload.errors import OffloadError
from offload.failure import Failure
from offload.targets import Target, TargetError, load_target

__all__ = ["loaded", "told"]


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
        raise Failure(f"a step of {target.name!r} failed: {_told(error)}") from None


def _told(error: BaseException) -> str:
    """An exception in one line, and where it was raised."""
    what = f"{type(error).__name__}: {error}".rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    here, inside = str(Path(__file__).parent), str(Path(torch.__file__).parent)
    own = [f for f in frames if not f.filename.startswith((here, inside, "<"))]
    frame = (own or list(frames))[-1]  # there is one: this module's
    return f"{what} ({frame.filename}:{frame.lineno})"
