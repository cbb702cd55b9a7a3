"""What must fault does, and what ends early ends well: each in a process of its own."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = f"""
import ctypes, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import simdev, torch
simdev.load()
simdev.configure(scheduler=simdev.Scheduler.THREADS)
x = torch.ones(1 << 16, device="sim")
host = torch.zeros(1 << 16, pin_memory=True)
torch.accelerator.synchronize()
def slowly(): simdev.configure(guard_host=True, copy_latency_ns=200_000_000, sleep_scale=1)
"""


def run(code: str) -> tuple[int, str]:
    command = [sys.executable, "-c", PREAMBLE + code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    # torch remarks on a machine that has the compiler of an accelerator and not the accelerator.
    told = [t for t in done.stderr.splitlines(True) if "No CUDA runtime is found" not in t]
    return done.returncode, done.stdout + "".join(told)


@pytest.mark.parametrize(
    "code",
    [
        "ctypes.c_float.from_address(x.data_ptr()).value",
        "slowly(); host.copy_(x, non_blocking=True); host[100].item()",
        "slowly(); x.copy_(host, non_blocking=True); host.fill_(3)",
    ],
    ids=["device memory", "target of a copy in flight", "source of a copy in flight"],
)
def test_the_host_faults_on(code):
    assert run(code) == (-signal.SIGSEGV, "")


def test_a_guard_ends_with_its_copy():
    code = """
slowly()
host.copy_(x, non_blocking=True)
torch.accelerator.synchronize()
assert host[100].item() == 1
x.copy_(host, non_blocking=True)
assert host[100].item() == 1  # reading the source is fine
torch.accelerator.synchronize()
host.fill_(3)
simdev.inject_copy_fault(simdev.Direction.D2H)
host.copy_(x, non_blocking=True)
try: torch.accelerator.synchronize()
except RuntimeError: print(host[100].item())
"""
    assert run(code) == (0, "3.0\n")


def test_a_process_can_end_while_tasks_wait():
    assert run("for _ in range(50): x = x * 1.0001\nprint('end')") == (0, "end\n")


def test_data_loader_workers_can_fork():
    code = """
data = torch.arange(8.0)
loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, pin_memory=True)
print([batch.to('sim', non_blocking=True).sum().item() for batch in loader])
"""
    assert run(code) == (0, "[6.0, 22.0]\n")
