"""What NVML says of a device, by a double with the interface of the real module."""

# ruff: noqa: N802 - the names are NVML's

import inspect

import pynvml
import pytest
import torch

from offload.probe.link import PcieLink, _pcie, accelerator_facts


class FakeNvml:
    """A driver with one device. Every function has its namesake in ``pynvml``."""

    NVMLError = pynvml.NVMLError

    def __init__(self, *, present: bool = True) -> None:
        self.present = present
        self.open = 0

    def nvmlInit(self):
        if not self.present:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.open += 1

    def nvmlShutdown(self):
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "GPU-12":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return "handle"

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle):
        return 3

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle):
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle):
        return 8

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle):
        return 16


@pytest.mark.parametrize("name", [n for n in vars(FakeNvml) if n.startswith("nvml")])
def test_the_double_has_the_real_interface(name: str) -> None:
    ours = inspect.signature(getattr(FakeNvml(), name))
    assert list(ours.parameters) == list(inspect.signature(getattr(pynvml, name)).parameters)


def test_the_link_is_read_and_the_library_closed() -> None:
    nvml = FakeNvml()
    assert _pcie(nvml, "12") == (PcieLink(3, 8, 4, 16), "")
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("nvml", "uuid", "why"),
    [(FakeNvml(present=False), "12", "Not Found"), (FakeNvml(), "13", "Not Found")],
)
def test_what_it_does_not_know_is_told_with_its_words(nvml: FakeNvml, uuid: str, why: str) -> None:
    link, told = _pcie(nvml, uuid)
    assert link is None and why in told
    assert nvml.open == 0


def test_the_real_library_is_asked_without_harm() -> None:
    link, told = _pcie(pynvml, "no such device")
    assert link is None and told


def test_rates_of_links() -> None:
    assert PcieLink(3, 16, 5, 16).bytes_per_s == pytest.approx(15.75e9, rel=1e-3)
    assert PcieLink(3, 16, 5, 16).max_bytes_per_s == pytest.approx(63.0e9, rel=1e-3)
    assert PcieLink(1, 4, 6, 1).bytes_per_s == 1e9


def test_the_processor_is_no_accelerator() -> None:
    assert accelerator_facts(torch.device("cpu")) is None
