"""Option files: the options of a session as TOML, for ``Config.from_file`` and what tuning writes.

    [session]
    window_bytes = 33554432
    prefetch_bytes = "48MiB"

Other tables are notes for people and are not looked at.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from offload.system.files import write_whole

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["TABLE", "read_options", "what_there_is", "write_options"]

TABLE = "session"


def read_options(path: str | os.PathLike[str], known: Iterable[str]) -> dict[str, Any]:
    """The options in a file.

    Args:
        path: of the file.
        known: names that an option may have.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no TOML, has no table of options, or an option that is not known; the
            message names the nearest one.
    """
    where = os.fspath(path)
    try:
        document = tomllib.loads(Path(where).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where} is no TOML: {error}") from None
    options = document.get(TABLE)
    if not isinstance(options, dict):
        near = get_close_matches(TABLE, document, n=1)
        hint = f"; did you mean [{TABLE}] by [{near[0]}]?" if near else ""
        raise ValueError(f"{where} has no table [{TABLE}]{hint}")
    names = sorted(known)
    for name in options:
        if name not in names:
            hint = what_there_is(name, names)
            raise ValueError(f"{where}: [{TABLE}] has no option {name!r}; {hint}")
    return options


def what_there_is(name: str, names: Iterable[str]) -> str:
    """A hint for who gave a name that is none of these: the nearest, or all.

    Example:
        >>> what_there_is("windowbytes", ["window_bytes", "verify"])
        "did you mean 'window_bytes'?"
    """
    names = sorted(names)
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"


def write_options(
    path: str | os.PathLike[str],
    options: Mapping[str, int | float | bool | str | None],
    *,
    title: str = "",
    notes: Mapping[str, int | float | bool | str] | None = None,
) -> None:
    """Write a file that ``read_options`` reads; what was there before is replaced as a whole.

    Args:
        path: of the file.
        options: of the session; ``None``: its default, which needs no line.
        title: a first line for people.
        notes: written to a table ``[notes]``.

    Raises:
        OSError: it cannot be written.
    """
    lines = [f"# {line}" for line in title.splitlines()]
    given = {name: value for name, value in options.items() if value is not None}
    for table, values in ((TABLE, given), ("notes", notes or {})):
        if values:
            lines += ["", f"[{table}]"] if lines else [f"[{table}]"]
            lines += [f"{name} = {_toml(value)}" for name, value in values.items()]
    write_whole(path, "\n".join(lines) + "\n")


def _toml(value: int | float | bool | str) -> str:
    """What JSON writes for these kinds of values is TOML too, but for one character that TOML wants
    escaped and surrogates, which it has not.
    """
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
