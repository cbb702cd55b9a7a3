"""The command ``offload``, also ``python -m offload``. A subcommand is a module of its own."""

from __future__ import annotations

from typing import Any

import click

from offload import __version__
from offload.cli import demo, merge_traces, plan, probe, profile, sweep, terminal, tune

__all__ = ["main"]


class _Commands(click.Group):
    """Ends in one line whatever happens to the terminal, and with the shell's status for an
    interrupt; click's own, 1, is a verdict of ours.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        with terminal.opened():
            return super().main(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("Interrupted.", err=True)
            raise click.exceptions.Exit(130) from None


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="offload")
def main() -> None:
    """Train with activations kept on disk between forward and backward.

    Exit status of all commands: 0 done, 1 done and the answer is no, 2 wrong usage, 3 it could not
    be done, 130 interrupted.
    """


for module in (demo, profile, merge_traces, probe, tune, plan, sweep):
    main.add_command(module.command)

if __name__ == "__main__":
    main(prog_name="offload")
