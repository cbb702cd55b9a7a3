"""Bytes and times: read from what people write, printed as people read."""

import re

import humanfriendly

_SIZE = re.compile(r"\s*\d+(\.\d+)?\s*([kmgtpe](i?b)?|b|bytes?)?\s*", re.IGNORECASE | re.ASCII)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MAX_BYTES = 1 << 60  # more than any machine has
SECONDS_PER_DAY = 86_400


def parse_bytes(value: int | str, name: str) -> int:
    """A size in bytes from an int or a text like ``"8GiB"``, ``"500 MB"`` or ``"4096"``.

    Args:
        value: bytes as an int, or a number with a unit (MiB is 2**20, MB is 10**6).
        name: the option this is for, named in the error.

    Raises:
        TypeError: ``value`` is neither an int nor a str.
        ValueError: the text is no size, or the size is negative or beyond ``MAX_BYTES``.

    Example:
        >>> parse_bytes("1.5MiB", "min_offload_bytes")
        1572864
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}); give an int or a text like '8GiB'"
        )
    if isinstance(value, str):
        if value.lstrip().startswith("-"):
            raise ValueError(f"{name} is {value!r}; a size cannot be negative")
        # The library looks at the first letter of a unit only: '12 parsecs' would be petabytes.
        if not _SIZE.fullmatch(value):
            raise ValueError(
                f"{name} is {value!r}, which is no size; write '64MiB', '8GiB' or 1048576"
            )
        nbytes = int(humanfriendly.parse_size(value))
    else:
        nbytes = value
    if nbytes < 0:
        raise ValueError(f"{name} is {value}; a size cannot be negative")
    if nbytes > MAX_BYTES:
        raise ValueError(f"{name} is {value!r}; no machine has more than {MAX_BYTES} bytes")
    return nbytes


def format_bytes(nbytes: int | float) -> str:
    """Bytes as people read them.

    Example:
        >>> format_bytes(3 * 2**20)
        '3 MiB'
        >>> format_bytes(100)
        '100 bytes'
    """
    return str(humanfriendly.format_size(int(nbytes), binary=True))


def format_seconds(seconds: float) -> str:
    """A duration with a unit that keeps three digits readable.

    Example:
        >>> format_seconds(0.0123)
        '12.3 ms'
    """
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def format_rate(bytes_per_s: float) -> str:
    """A rate in powers of ten, as makers of drives and links give theirs.

    Example:
        >>> format_rate(5.23e9)
        '5.23 GB/s'
        >>> format_rate(80e6)
        '80 MB/s'
    """
    if bytes_per_s < 1e9:
        return f"{bytes_per_s / 1e6:.3g} MB/s"
    return f"{bytes_per_s / 1e9:.2f} GB/s"
