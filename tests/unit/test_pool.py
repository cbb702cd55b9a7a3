"""The pool under torch's CPU allocator: where it is, what it does, and when it keeps away.

It is there for the life of a process, so every test has one of its own.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

PROLOGUE = """
import json, os, psutil, torch
import offload
from offload import _native
from offload.system.pool import use_pool
from offload.units import MIB
torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
def tensor(mib):
    return torch.ones(mib * MIB, dtype=torch.uint8)
def resident():
    return psutil.Process().memory_info().rss
def used():
    return _native.pool_stats()["used_bytes"]
"""


def run(program: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROLOGUE + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **(environment or {})},
    )


def outcome(program: str) -> Any:
    done = run(program)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_session_of_the_cpu_brings_it_and_leaves_it():
    found = outcome("""
before = tensor(1)
stats = [_native.pool_stats()]
with offload.Session(device="cpu"):
    inside = tensor(2)
    stats.append(used())
del inside, before
later = tensor(3)
stats.append(used())
print(json.dumps(stats))
""")
    assert found == [None, 2 << 20, 3 << 20]


def test_a_session_that_is_told_to_leaves_the_allocator_alone():
    assert (
        outcome("""
with offload.Session(device="cpu", allocator="system"):
    tensor(1)
print(json.dumps(_native.pool_stats()))
""")
        is None
    )


def test_memory_is_used_again_and_the_process_stays_small():
    """As in a forward whose tensors leave: each has the memory of one that left before."""
    grown = outcome("""
use_pool("pool")
base = resident()
held = [tensor(16)]
for _ in range(40):
    held.append(tensor(16))
    small = [torch.ones(1000) for _ in range(50)]
    held.pop(0)
print(json.dumps(resident() - base))
""")
    assert grown < 64 << 20


def test_everything_that_lets_go_of_a_tensor_reaches_it():
    """Views, NumPy, resizing, threads, serialization, shared memory, a reference cycle."""
    assert (
        outcome("""
import gc, io, threading
import numpy as np
use_pool("pool")
array = tensor(2).numpy()
array[:] = 3
view = torch.from_numpy(array)[1:]
assert int(view.sum()) == 3 * (2 * MIB - 1)
del array, view
resized = tensor(1)
resized.resize_(4 * MIB)
resized.untyped_storage().resize_(MIB)
del resized
buffer = io.BytesIO()
torch.save(tensor(2), buffer)
buffer.seek(0)
assert torch.equal(torch.load(buffer), tensor(2))
shared = tensor(1).share_memory_()
box = [tensor(1)]
thread = threading.Thread(target=box.clear)
thread.start()
thread.join()
class Cycle: pass
cycle = Cycle(); cycle.self, cycle.tensor = cycle, tensor(1)
del cycle, shared
gc.collect()
print(json.dumps(used()))
""")
        == 0
    )


def test_small_tensors_stay_with_the_c_library():
    assert (
        outcome("""
use_pool("pool")
small = [torch.ones(100 << 10, dtype=torch.uint8) for _ in range(100)]
print(json.dumps(used()))
""")
        == 0
    )


def test_loader_workers_forked_from_the_process():
    assert outcome("""
from torch.utils.data import DataLoader
use_pool("pool")
class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 16
    def __getitem__(self, index):
        return torch.full((MIB,), float(index))
parent = tensor(8)
loader = DataLoader(Images(), batch_size=4, num_workers=2, multiprocessing_context="fork")
sums = [int(batch[:, 0].sum()) for batch in loader]
assert bool((parent == 1).all())
print(json.dumps(sums))
""") == [6, 22, 38, 54]


def test_forks_while_other_threads_allocate():
    assert (
        outcome("""
import threading
use_pool("pool")
tensor(1)  # a fork in the middle of torch's first call would leave its children waiting for that
stop = threading.Event()
def work():
    while not stop.is_set():
        tensor(1)
threads = [threading.Thread(target=work) for _ in range(3)]
[t.start() for t in threads]
codes = []
for _ in range(30):
    child = os.fork()
    if child == 0:
        tensor(1)
        os._exit(0)
    codes.append(os.waitpid(child, 0)[1])
stop.set()
[t.join() for t in threads]
print(json.dumps(sum(codes)))
""")
        == 0
    )


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="registers handlers as glibc does")
@pytest.mark.parametrize("moment", ["prepare", "parent", "child"])
def test_the_fork_handlers_of_other_libraries_may_free_tensors(moment: str):
    """Those registered before ours run after ours has prepared, and before it has finished."""
    assert (
        outcome(f"""
import ctypes
held = []
Handler = ctypes.CFUNCTYPE(None)
clear = Handler(held.clear)
places = [clear if name == {moment!r} else Handler() for name in ("prepare", "parent", "child")]
ctypes.CDLL(None)["__register_atfork"](*places, None)
use_pool("pool")
held.append(tensor(1))
child = os.fork()
if child == 0:
    tensor(1)
    os._exit(0)
status = os.waitpid(child, 0)[1]
held.clear()
tensor(1)
print(json.dumps(status + used()))
""")
        == 0
    )


OTHER_ALLOCATOR = """
#include <stdlib.h>
extern void *__libc_memalign(size_t, size_t);
int posix_memalign(void **out, size_t alignment, size_t nbytes) {
  *out = __libc_memalign(alignment, nbytes);
  return 0;
}
"""


@pytest.fixture
def other_allocator(tmp_path: Path) -> str:
    """A library that takes the C library's place, as jemalloc's does."""
    source, library = tmp_path / "other.c", tmp_path / "libother.so"
    source.write_text(OTHER_ALLOCATOR)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def test_an_allocator_that_somebody_chose_is_left_in_its_place(other_allocator: str):
    done = run(
        """
with offload.Session(device="cpu"):
    tensor(1)
print(json.dumps(_native.pool_stats()))
offload.Session(device="cpu", allocator="pool")
""",
        {"LD_PRELOAD": other_allocator},
    )
    assert done.stdout == "null\n"
    error = done.stderr.splitlines()[-1]
    assert "allocator='pool' cannot be had" in error
    assert "libother.so" in error


def test_where_addresses_are_limited_it_leaves_them_to_others():
    done = run("""
import resource
now = psutil.Process().memory_info().vms
resource.setrlimit(resource.RLIMIT_AS, (now + 2000 * MIB, now + 2000 * MIB))
offload.Session(device="cpu", prefetch_bytes=0).close()
assert _native.pool_stats() is None
use_pool("pool")
""")
    assert "ulimit -v" in done.stderr.splitlines()[-1]
    assert "allocator='pool' cannot be had" in done.stderr


def test_a_tensor_larger_than_the_machine_is_refused_as_without_the_pool():
    program = """
use_pool(%r)
try:
    torch.empty(psutil.virtual_memory().total * 5 // 4, dtype=torch.uint8)
    print(json.dumps("given"))
except RuntimeError as error:
    print(json.dumps("DefaultCPUAllocator: can't allocate memory" in str(error)))
"""
    assert outcome(program % "pool") == outcome(program % "system")


def test_memory_goes_back_when_the_session_closes():
    kept, grown = outcome("""
base = resident()
with offload.Session(device="cpu") as session:
    for _ in range(2):
        with session.step():
            tensors = [tensor(64) for _ in range(8)]
            del tensors
    kept = _native.pool_stats()["kept_bytes"]
print(json.dumps([kept, resident() - base]))
""")
    assert kept == 512 << 20  # spared the next step's page faults
    assert grown < 100 << 20


def test_gradients_are_the_same_with_and_without(tmp_path: Path):
    program = """
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6)))
x = torch.randn(512, 512)
with offload.Session(device="cpu", disk_dir=%r, min_offload_bytes=0, allocator=%r) as session:
    for _ in range(3):
        with session.step():
            model(x).square().sum().backward()
print(json.dumps([float(p.grad.double().sum()).hex() for p in model.parameters()]))
"""
    directory = str(tmp_path)
    assert outcome(program % (directory, "pool")) == outcome(program % (directory, "system"))
