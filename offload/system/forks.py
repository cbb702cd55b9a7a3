"""Forks: tells a process from its forked children without asking the kernel."""

import os

# How many forks lie between this process and the one that imported this module. A name of the
# module and no function, as it is looked at twice for each saved tensor.
generation = 0


def _count() -> None:
    global generation
    generation += 1


os.register_at_fork(after_in_child=_count)
