"""Failure: a command that could not do its work.

The exit statuses of all commands:

0    done
1    done, and the answer is no: the runs differ, offloading is not recommended, no plan fits
2    wrong usage
3    could not be done
130  interrupted
141  the reader of standard output has gone
"""

import contextlib
from collections.abc import Iterator

import click

__all__ = ["Failure", "Refusal", "mistakes_told"]


class Failure(click.ClickException):
    """Told in one line, without a traceback."""

    exit_code = 3


class Refusal(click.ClickException):
    """What was asked for was found out not to be possible; told in one line."""

    exit_code = 1


@contextlib.contextmanager
def mistakes_told() -> Iterator[None]:
    """Inside, an argument or an option that cannot work is told as wrong usage."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise click.UsageError(str(error)) from None
