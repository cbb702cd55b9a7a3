"""The heap: trimmed when the process has grown, and only then."""

import psutil
import torch

from offload.heap import Heap

MiB = 1 << 20


def test_growth_is_given_back():
    """Freed blocks that the C library keeps go back to the system."""
    heap = Heap(trim_bytes=32 * MiB)
    # Blocks below the library's threshold for a mapping of their own, with others between them that
    # stay: the holes cannot merge and cannot leave by the top of the heap.
    blocks = [torch.ones(64 << 10, dtype=torch.uint8) for _ in range(2048)]
    grown = psutil.Process().memory_info().rss
    del blocks[::2]
    heap.released(64 * MiB)
    assert heap.trims == 1
    assert psutil.Process().memory_info().rss < grown - 32 * MiB


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
