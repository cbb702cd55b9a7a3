"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from pathlib import Path

__all__ = ["expect_writable", "readable", "write_whole"]


def write_whole(path: str | os.PathLike[str], data: str | bytes) -> None:
    """Write a file; what was there before is replaced as a whole, or stays as it was.

    Args:
        path: of the file. Through a symbolic link its target is written; a device or a pipe is
            written to.
        data: text is written as UTF-8, made ``readable``.

    Raises:
        OSError: it cannot be written; the error names the file.
    """
    target = Path(os.path.realpath(path))
    content = readable(data).encode() if isinstance(data, str) else data
    beside = target.with_name(f".offload-{os.getpid()}-{threading.get_native_id()}")
    try:
        if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
            target.write_bytes(content)
            return
        try:
            beside.write_bytes(content)
            if target.exists():
                beside.chmod(target.stat().st_mode & 0o7777)
            os.replace(beside, target)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def readable(text: str) -> str:
    r"""Text in which names of files are as people read them, whatever the locale is: bytes that it
    cannot decode are lone surrogates in Python, which no document may hold.

    Example:
        >>> readable("caf\udcc3\udca9 \udcff")
        'café �'
    """
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def expect_writable(path: str | os.PathLike[str]) -> None:
    """Before minutes are spent on what could not be written.

    Raises:
        OSError: ``write_whole`` would fail.

    Example:
        >>> expect_writable("no/such/file")
        Traceback (most recent call last):
            ...
        FileNotFoundError: [Errno 2] No such file or directory: 'no/such/file'
    """
    target = Path(os.path.realpath(path))
    asked = target if target.exists() else target.parent
    number = 0
    if target.is_dir() and os.fspath(path):
        number = errno.EISDIR
    elif not os.fspath(path) or not asked.exists():
        number = errno.ENOENT
    elif asked is not target and not asked.is_dir():
        number = errno.ENOTDIR
    elif not os.access(asked, os.W_OK):
        number = errno.EACCES
    if number:
        raise OSError(number, os.strerror(number), os.fspath(path))
