"""The heap: trimmed when the process has grown, and only then."""

import json
import subprocess
import sys

import torch

from offload.heap import Heap

MiB = 1 << 20

# In a process of its own: in this one, memory that earlier tests freed may serve the blocks, and
# the process does not grow by them.
GROW_AND_RELEASE = """
import json, psutil, torch
from offload.heap import Heap
MiB = 1 << 20
resident = lambda: psutil.Process().memory_info().rss
heap = Heap(trim_bytes=32 * MiB)
# Blocks below the library's threshold for a mapping of their own, with others between them that
# stay: the holes cannot merge and cannot leave by the top of the heap.
blocks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(2048)]
grown = resident()
del blocks[::2]
heap.released(64 * MiB)
print(json.dumps({"trims": heap.trims, "given_back": grown - resident()}))
"""


def test_growth_is_given_back():
    """Freed blocks that the C library keeps go back to the system."""
    done = subprocess.run(
        [sys.executable, "-c", GROW_AND_RELEASE], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout)
    assert figures["trims"] == 1
    assert figures["given_back"] > 32 * MiB


def test_nothing_happens_without_growth():
    heap = Heap(trim_bytes=1 << 40)
    for _ in range(8):
        heap.released(64 * MiB)
    assert heap.trims == 0


def test_zero_never_trims():
    heap = Heap(trim_bytes=0)
    blocks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(1024)]
    heap.released(1 << 40)
    assert heap.trims == 0
    del blocks
