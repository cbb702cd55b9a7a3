"""Engines: host memory and the scratch file, and what moves bytes between them.

    base.py      what an engine is: an arena of slots, and requests
    native.py    the engine in C++
    aio.py       the engine in Python
    store.py     extents of the scratch file, read and written with clear errors
    freelist.py  which ranges of a linear space are free
    budget.py    a ledger of bytes with a hard limit

``open_engine`` picks one.
"""

import importlib.util

from offload.config import Config
from offload.engines.base import PAGE_BYTES, Arena, Engine, Request, Slot, padded
from offload.errors import warn_user

__all__ = [
    "PAGE_BYTES",
    "Arena",
    "Engine",
    "Request",
    "Slot",
    "native_is_built",
    "open_engine",
    "padded",
]


def native_is_built() -> bool:
    """Whether the C++ extension is part of this installation."""
    return importlib.util.find_spec("offload._native") is not None


def open_engine(config: Config) -> Engine:
    """The engine that ``config`` names, with its scratch file open and its threads running.

    Raises:
        ImportError: ``engine="native"`` was asked for by name and the extension was not built.
        OSError: the scratch file cannot be made.
    """
    name = config.engine
    if name is None and not native_is_built():
        warn_user(
            "the C++ extension of offload was not built (no compiler at installation?): the slower "
            "'aio' engine is used; install a C++17 compiler and reinstall, or say engine='aio' to "
            "silence this"
        )
        name = "aio"
    block_bytes = config.io_block_bytes // PAGE_BYTES * PAGE_BYTES  # direct I/O moves whole pages
    if name == "aio":
        from offload.engines.aio import AioEngine

        return AioEngine(config.disk_dir, threads=config.io_threads, block_bytes=block_bytes)
    from offload.engines.native import NativeEngine

    return NativeEngine(config.disk_dir, threads=config.io_threads, block_bytes=block_bytes)
