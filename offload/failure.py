"""Failure: a command that could not do its work.

The exit statuses of all commands:

0    done
1    done, and the answer is no: the runs differ, offloading is not recommended, no plan fits
2    wrong usage
3    could not be done
130  interrupted
"""

import click

__all__ = ["Failure"]


class Failure(click.ClickException):
    """Told in one line, without a traceback."""

    exit_code = 3
