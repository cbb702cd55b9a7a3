"""The heap: trimmed when the process has grown, and only then."""

import json
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

import offload
from offload.heap import Heap

MiB = 1 << 20

# In a process of its own: in this one, memory that earlier tests freed may serve the blocks, and
# the process does not grow by them.
GROW_AND_RELEASE = """
import json, psutil, torch
import offload
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


# The same heap, in a process of its own for the same reason: what stays, and what goes at once.
RETIRE = """
import json, psutil, torch
import offload
from offload.heap import Heap
MiB = 1 << 20
resident = lambda: psutil.Process().memory_info().rss
heap = Heap(trim_bytes=1 << 40)
heap_tensor = lambda: torch.ones(16 * MiB, dtype=torch.uint8)
torch.ones(31 * MiB, dtype=torch.uint8)  # glibc takes 16 MiB from its heap from now on
tensors = [heap_tensor() for _ in range(8)]
fence = torch.ones(64 << 10, dtype=torch.uint8)
grown = resident()
while tensors:
    heap.retire(tensors.pop(0).untyped_storage())
    heap.sweep()
print(json.dumps({"given_back": grown - resident(), "returned": heap.returned_bytes}))
"""


def test_pages_of_retired_storages_are_returned():
    done = subprocess.run(
        [sys.executable, "-c", RETIRE], capture_output=True, text=True, check=True
    )
    figures = json.loads(done.stdout)
    assert figures["returned"] > 8 * 16 * MiB - 8 * 2 * 4096 - 1
    assert figures["given_back"] > 7 * 16 * MiB


def large() -> torch.Tensor:
    return torch.full((MiB,), 7, dtype=torch.uint8)


def test_what_a_tensor_still_has_is_untouched_until_it_lets_go():
    heap = Heap(trim_bytes=1 << 40)
    tensor = large()
    heap.retire(tensor.untyped_storage())
    heap.sweep()
    assert heap.returned_bytes == 0
    assert torch.equal(tensor, large())
    del tensor
    heap.sweep()
    assert heap.returned_bytes > MiB // 2


def test_what_python_still_has_is_untouched():
    """The storage object itself is one use, however many names it has."""
    heap = Heap(trim_bytes=1 << 40)
    storage = large().untyped_storage()
    heap.retire(storage)
    heap.sweep()
    assert heap.returned_bytes == 0
    assert set(storage.tolist()) == {7}


def test_what_numpy_owns_is_untouched():
    heap = Heap(trim_bytes=1 << 40)
    array = np.full(MiB, 7, dtype=np.uint8)
    heap.retire(torch.from_numpy(array).untyped_storage())
    heap.sweep()
    assert heap.returned_bytes == 0
    assert (array == 7).all()


def test_what_numpy_borrows_is_untouched():
    heap = Heap(trim_bytes=1 << 40)
    tensor = large()
    array = tensor.numpy()
    heap.retire(tensor.untyped_storage())
    del tensor
    heap.sweep()
    assert heap.returned_bytes == 0
    assert (array == 7).all()


def test_few_storages_wait_for_their_owners():
    heap = Heap(trim_bytes=1 << 40)
    tensors = [large() for _ in range(20)]
    for tensor in tensors:
        heap.retire(tensor.untyped_storage())
    tensors.clear()
    heap.sweep()
    assert heap.returned_bytes < 9 * MiB


@pytest.mark.parametrize("trim_bytes", [0, 1 << 40])
def test_what_a_weak_reference_could_bring_back_is_untouched(trim_bytes: int):
    """Another thread may bring it back to life at any moment, also while its pages are given up."""
    heap = Heap(trim_bytes)
    tensor = large()
    own = weakref.ref(tensor.untyped_storage())  # as the account of live bytes holds one
    others = weakref.ref(tensor.untyped_storage(), lambda _: None)
    heap.retire(tensor.untyped_storage())
    heap.sweep()
    assert torch.equal(torch.empty(0, dtype=torch.uint8).set_(others()), large())
    del tensor
    heap.sweep()
    assert heap.returned_bytes == 0
    assert own() is None, "and it is not kept alive for that"


def test_sessions_that_share_a_storage_do_not_lose_it(tmp_path):
    """Each knows it weakly and may serve it from memory: neither may give up its pages."""
    options = {"disk_dir": tmp_path, "keep_last_bytes": 0, "trim_bytes": "1MiB", "device": "cpu"}
    weights = [torch.ones(1, requires_grad=True) for _ in range(2)]
    with offload.Session(**options) as first, offload.Session(**options) as second:
        x = torch.full((1 << 20,), 2.0)
        with first.step():
            loss = (x * weights[0]).sum()
        heap = second._tiers.common.heap
        with second.step():
            other = (x * weights[1]).sum()
            del x
            heap.sweep()
            assert heap.returned_bytes == 0
        loss.backward()
        other.backward()
    assert weights[0].grad.item() == weights[1].grad.item() == 2 << 20
