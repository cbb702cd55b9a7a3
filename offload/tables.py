"""Tables as text."""

import io

from rich.console import Console, RenderableType

__all__ = ["text_of"]


def text_of(*parts: RenderableType, width: int = 100) -> str:
    """What ``rich`` would print, without colours.

    Example:
        >>> text_of("[bold]4[/] steps")
        '4 steps'
    """
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in parts:
        console.print(part)
    return out.getvalue().rstrip()
