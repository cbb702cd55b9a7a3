"""What commands that run a target share: how it is loaded, and how failures are told."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import torch

from offload.cli.failure import Failure, Refusal, mistakes_told
from offload.cli.targets import Target, TargetError, load_target
from offload.cli.terminal import kept_out, one_line
from offload.errors import OffloadError, PlanError
from offload.measure import session_options
from offload.step import Step
from offload.system.interrupts import stop_if_interrupted

__all__ = ["expect_installed", "options_of", "running"]

_OF_A_SESSION = ("disk_dir", "engine", "device", "host_budget", "disk_budget")


def options_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the session that the command line gives.

    Raises:
        click.UsageError: one of them cannot work.
    """
    with mistakes_told():
        return session_options(given["options"], **{k: given.get(k) for k in _OF_A_SESSION})


def expect_installed(module: str, option: str, extra: str) -> None:
    """Before minutes are spent on what could not be finished.

    Raises:
        click.UsageError: it is not.
    """
    if find_spec(module) is None:
        raise click.UsageError(f"{option} needs {module}: pip install 'offload[{extra}]'")


@contextlib.contextmanager
def running(given: Mapping[str, Any]) -> Iterator[Target]:
    """Loads the target; what goes wrong inside is told in one line, as what it is.

    Whatever the target prints goes to standard error, and the working directory is what it was
    afterwards.

    Args:
        given: ``target``, ``seed`` and ``threads`` of the command line.

    Raises:
        click.UsageError: a mistake in what was given: there is no such target, or it is none that
            this can be done with.
        Refusal: no plan fits.
        Failure: its own code failed, or the system did.
    """
    if given["threads"] is not None:
        torch.set_num_threads(given["threads"])
    with _same_directory(), kept_out():
        try:
            yield _guarded(_loaded(given["target"], given["seed"]))
        except click.ClickException:
            raise
        except (TypeError, ValueError) as error:
            raise click.UsageError(one_line(str(error))) from None
        except PlanError as error:
            raise Refusal(one_line(str(error))) from None
        except (OffloadError, OSError, Warning) as error:  # python -W error
            raise Failure(one_line(str(error))) from None


@contextlib.contextmanager
def _same_directory() -> Iterator[None]:
    here = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield
    finally:
        os.fchdir(here)
        os.close(here)


def _loaded(text: str, seed: int) -> Target:
    try:
        return load_target(text, seed=seed)
    except (TargetError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise Failure(f"the target {text!r} could not be loaded: {_told(error)}") from None


def _guarded(target: Target) -> Target:
    """The same target; what its step raises, and is none of ours, is a ``Failure``."""
    parent = os.getpid()

    def step() -> object:
        stop_if_interrupted()
        entered = Step.entered
        try:
            result = target.step()
        except (OffloadError, click.ClickException, KeyboardInterrupt):
            raise
        except BaseException as error:
            _end_if_forked(parent, error)
            raise Failure(f"a step of {target.name!r} failed: {_told(error)}") from None
        _end_if_forked(parent)
        stop_if_interrupted()
        if Step.entered > entered:
            raise TargetError(
                f"the step of {target.name!r} enters a session of its own: leave that to this "
                "command, and give the bare forward and backward"
            )
        if inspect.isgenerator(result) or inspect.iscoroutine(result):
            result.close()
            raise TargetError(
                f"the step of {target.name!r} returned a {type(result).__name__} and ran nothing: "
                "give a plain function, neither async nor with yield"
            )
        return result

    return replace(target, step=step)


def _end_if_forked(parent: int, error: BaseException | None = None) -> None:
    """A child that a step forked and that comes back from it is not to run the command too."""
    if os.getpid() == parent:
        return
    status = 0 if error is None else 1
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(status)


def _told(error: BaseException) -> str:
    """An exception in one line, and where it was raised."""
    try:
        text = one_line(str(error))
    except Exception:
        text = "its message cannot be shown"
    what = f"{type(error).__name__}: {text}".rstrip(": ")
    if isinstance(error, SyntaxError):
        return what  # which says where itself
    frames = traceback.extract_tb(error.__traceback__)
    here, inside = str(Path(__file__).parent.parent), str(Path(torch.__file__).parent)
    own = [f for f in frames if not f.filename.startswith((here, inside, "<"))]
    frame = (own or list(frames))[-1]  # there is one: this module's
    return f"{what} ({frame.filename}:{frame.lineno})"
