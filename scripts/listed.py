"""Options that take several values, separated by commas: callbacks for ``click.option``."""

from __future__ import annotations

from collections.abc import Callable, Collection

import click

Context, Parameter = click.Context, click.Parameter


def numbers(_: Context, __: Parameter, text: str) -> list[int]:
    """Whole numbers of at least 1."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise click.BadParameter(f"{text!r} is no list of numbers like 1,2,4")
    return [int(part) for part in parts]


def names_of(known: Collection[str]) -> Callable[[Context, Parameter, str], list[str]]:
    """Some of these names, each once, or ``all``."""

    def parse(_: Context, __: Parameter, text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        for name in names:
            if name not in known:
                raise click.BadParameter(f"{name!r} is none of {', '.join(known)}")
        if len(set(names)) < len(names):
            raise click.BadParameter("a name is given twice")
        return names

    return parse
