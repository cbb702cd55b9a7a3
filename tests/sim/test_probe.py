"""The probe's link and arithmetic on the simulated accelerator, whose true rates are known."""

from pathlib import Path

import offloading
import pytest
import simdev
import torch

import offload
from offload.lanes.pinning import PINNERS
from offload.probe.link import accelerator_facts, measure_flops, measure_link
from offload.probe.survey import survey
from offload.probe.verdicts import Level, findings
from offload.units import MIB


def measured(directory: Path, **rates: float):
    simdev.configure(timed_queries=True, launch_ns=100, **rates)
    return measure_link(torch.device("sim", 0), str(directory), copy_bytes=4 * MIB, copies=8)


@pytest.mark.parametrize(("out", "into"), [(25e9, 25e9), (10e9, 12e9), (1e9, 50e9)])
def test_rates_and_latency_are_found(out: float, into: float, tmp_path: Path) -> None:
    found = measured(tmp_path, d2h_bytes_per_s=out, h2d_bytes_per_s=into, copy_latency_ns=8000)
    assert found.out_bytes_per_s == pytest.approx(out, rel=0.02)
    assert found.in_bytes_per_s == pytest.approx(into, rel=0.02)
    assert found.duplex_out_bytes_per_s == pytest.approx(out, rel=0.02)
    assert found.duplex_in_bytes_per_s == pytest.approx(into, rel=0.02)
    assert found.latency_seconds == pytest.approx(8e-6, rel=0.05)
    assert found.pinned and simdev.stats().pinned.current_bytes == 0


class Refusing(offloading.SimPinner):
    """A driver that pins nothing."""

    def pin(self, address: int, nbytes: int) -> None:
        raise RuntimeError("refused")


def test_memory_that_is_not_pinned_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PINNERS, "sim", Refusing)
    assert measured(tmp_path).pinned is False


def test_arithmetic() -> None:
    simdev.configure(timed_queries=True, flops_per_s=1e11, hbm_bytes_per_s=1e15, launch_ns=100)
    found = measure_flops(torch.device("sim", 0))
    assert found == pytest.approx(1e11, rel=0.02)


def test_a_whole_survey(tmp_path: Path) -> None:
    simdev.configure(timed_queries=True, flops_per_s=1e11, launch_ns=100)
    config = offload.Config(device="sim", disk_dir=tmp_path)
    found = survey(config, seconds=0.005)
    assert found.accelerator is not None and found.accelerator.device == "sim:0"
    assert found.accelerator.pcie is None
    assert found.link is not None and found.link.pinned
    told = findings(found)
    assert any("link:" in f.text for f in told)
    assert all(f.level is not Level.BAD for f in told)
    assert accelerator_facts(torch.device("sim", 0)) == found.accelerator
