"""How much of the transfer is hidden, in virtual time: what the model says, without noise.

A step cannot be shorter than its computation, nor than what has to cross the link in each half of
it. What the window still holds when the forward ends may cross during the backward, so:

    max(F, (out - window) / rate) + max(B, back / rate)  <=  step,   and
    step  <=  max(F, out / rate) + max(B, back / rate),  up to a few percent

with F and B the times of a plain forward and backward.
"""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import simdev
import torch
from offloading import open_engine, session_on_sim
from torch import Tensor, nn

from offload.engines import Engine, Slot
from offload.lanes.accelerator import AcceleratorLane
from offload.lanes.base import Fence
from offload.lanes.order import Order
from offload.units import MIB

WINDOW = 8 * MIB
WINDOWS = {"window_bytes": WINDOW, "prefetch_bytes": WINDOW, "keep_last_bytes": 4 * MIB}


class Block(nn.Module):
    """A residual feed-forward block: 9 MiB of activations at 512 tokens."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Times(NamedTuple):
    """Of one step, in virtual nanoseconds, with what crossed the link."""

    forward_ns: int
    step_ns: int
    out_bytes: int
    back_bytes: int


class Rig:
    """A stack of blocks on a device whose link can be made faster or slower."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*[Block() for _ in range(12)]).to("sim")
        self.x = torch.randn(512, 256).to("sim")
        self.set_rate(25e9)
        self.plain = self.run(contextlib.nullcontext)

    def set_rate(self, bytes_per_s: float) -> None:
        simdev.configure(
            timed_queries=True, d2h_bytes_per_s=bytes_per_s, h2d_bytes_per_s=bytes_per_s,
            flops_per_s=1e12, hbm_bytes_per_s=1e12, launch_ns=1000, copy_latency_ns=1000,
            min_kernel_ns=1000,
        )  # fmt: skip

    def run(self, step: Callable[[], Any]) -> Times:
        """The second of two steps."""
        for _ in range(2):
            torch.accelerator.synchronize()
            start_ns, before = simdev.virtual_time_ns(), simdev.stats()
            with step():
                loss = self.model(self.x).square().mean()
                forward_ns = simdev.virtual_time_ns() - start_ns
                loss.backward()
            self.model.zero_grad()
            step_ns, after = simdev.virtual_time_ns() - start_ns, simdev.stats()
        return Times(
            forward_ns,
            step_ns,
            after.d2h.nbytes - before.d2h.nbytes,
            after.h2d.nbytes - before.h2d.nbytes,
        )

    def ratio(self, bytes_per_s: float, directory: Path, **options: Any) -> float:
        """Time of an offloaded step over that of a plain one."""
        self.set_rate(bytes_per_s)
        with session_on_sim(str(directory), **{**WINDOWS, **options}) as session:
            return self.run(session.step).step_ns / self.plain.step_ns


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("gb_per_s", [1, 2, 5, 10, 25, 50])
def test_step_takes_what_the_model_says(gb_per_s: int, rig: Rig, tmp_path: Path) -> None:
    rig.set_rate(gb_per_s * 1e9)
    with session_on_sim(str(tmp_path), **WINDOWS) as session:
        ours = rig.run(session.step)
    assert ours.out_bytes > 50 * MIB
    forward_ns = rig.plain.forward_ns
    backward_ns = rig.plain.step_ns - forward_ns
    back_ns = max(backward_ns, ours.back_bytes / gb_per_s)
    least_ns = max(forward_ns, (ours.out_bytes - WINDOW) / gb_per_s) + back_ns
    most_ns = max(forward_ns, ours.out_bytes / gb_per_s) + back_ns
    assert 0.93 * least_ns <= ours.step_ns <= 1.02 * most_ns


def test_a_usual_link_hides_everything(rig: Rig, tmp_path: Path) -> None:
    assert rig.ratio(25e9, tmp_path) <= 1.02


def test_no_prefetch_is_seen(rig: Rig, tmp_path: Path) -> None:
    """Without it every reload is waited for; this is what a broken prefetcher would look like."""
    assert rig.ratio(10e9, tmp_path, prefetch_bytes=0) > 1.1 > 1.02 > rig.ratio(10e9, tmp_path)


class SerialLane(AcceleratorLane):
    """Lets the host wait for every copy out, as an offloader without streams does.

    Without a tail: what leaves late was computed long ago, and waiting for it costs little.
    """

    def copy_out(
        self, slot: Slot, storage: torch.UntypedStorage, produced: object, **options: Any
    ) -> tuple[Fence, int | None]:
        copied = super().copy_out(slot, storage, produced, **options)
        copied[0].synchronize()
        return copied


def test_waiting_on_the_host_is_seen(rig: Rig, tmp_path: Path) -> None:
    def serial(engine: Engine) -> AcceleratorLane:
        return SerialLane(engine, Order())

    at_once = {"keep_last_bytes": 0}
    waiting = {**at_once, "_lane": serial, "_engine": open_engine(str(tmp_path))}
    assert rig.ratio(10e9, tmp_path, **waiting) > 1.1 > 1.02 > rig.ratio(10e9, tmp_path, **at_once)


def test_the_window_bounds_what_waits_on_the_device(rig: Rig, tmp_path: Path) -> None:
    """A host that runs far ahead of a slow link does not pile up sources on the device."""
    rig.set_rate(1e9)

    def peak_bytes(step: Callable[[], Any]) -> int:
        torch.accelerator.synchronize()
        torch.accelerator.reset_peak_memory_stats()
        base_bytes = torch.accelerator.memory_allocated()
        with step():
            loss = rig.model(rig.x).square().mean()
            peak = torch.accelerator.max_memory_allocated() - base_bytes
            loss.backward()
        rig.model.zero_grad()
        return peak

    plain = peak_bytes(contextlib.nullcontext)
    with session_on_sim(str(tmp_path), **WINDOWS) as session:
        ours = peak_bytes(session.step)
    temporaries = 4 * MIB
    assert ours <= WINDOW + WINDOWS["keep_last_bytes"] + temporaries < plain / 3
