"""Forks: tells a process from its forked children without asking the kernel."""

import os

_generation = 0


def _count() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_count)


def generation() -> int:
    """How many forks lie between this process and the one that imported this module.

    Example:
        >>> mine = generation()
        >>> mine == generation()  # as long as this is the same process
        True
    """
    return _generation
