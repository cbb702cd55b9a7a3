"""System: what the process and its machine offer.

machine.py      memory, processors, devices, and the file system that a directory is on
forks.py        whether this process was forked
interrupts.py   Ctrl-C, neither lost nor come where it would do harm
files.py        files that are written whole or not at all
pool.py         memory for tensors of the CPU, used again as soon as it is free
"""
