"""Figures of matplotlib, which is optional: made without a window, and written to bytes."""

from __future__ import annotations

import io
import warnings
from typing import Any

from offload.system.files import readable

__all__ = ["drawn", "titled"]


def titled(text: str) -> str:
    """``text`` as it stands, as a title: names of files as people read them, and no mathematics."""
    return readable(text).replace("$", r"\$")


def drawn(figure: Any, kind: str) -> bytes:
    """A figure as ``"png"`` or ``"svg"``. Letters that its font lacks are boxes."""
    out = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        figure.savefig(out, format=kind, dpi=150)
    return out.getvalue()
