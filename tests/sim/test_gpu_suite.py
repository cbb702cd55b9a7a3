"""What is meant for a real accelerator runs on the simulated one too, so that it is never stale."""

from pathlib import Path

import bench_accelerator
import test_accelerator
from test_accelerator import *  # noqa: F403  its tests and fixtures

test_accelerator.SIZE = test_accelerator.Size(rows=4, length=64, width=64)
SMALL = {"tokens": 128, "layers": 3, "width": 64, "hidden": 128, "heads": 4, "kv_heads": 2}


def test_every_mode_of_the_bench(tmp_path: Path) -> None:
    figures = {
        mode: bench_accelerator.measure(
            bench_accelerator.Case(mode=mode, steps=1, disk_dir=str(tmp_path), **SMALL)
        )
        for mode in ("plain", "checkpoint", "save_on_cpu", "offload")
    }
    # save_on_cpu gives up strides, and with them the last bits of some products.
    assert figures["offload"]["gradients"] == figures["plain"]["gradients"]
    assert figures["checkpoint"]["gradients"] == figures["plain"]["gradients"]
    assert figures["checkpoint"]["peak_bytes"] < figures["plain"]["peak_bytes"]
    link = bench_accelerator.measure_link()
    assert all(rate > 0 for rate in link.values())
