"""Copies between devices and host slots. ``open_lane`` makes the one for a kind of device."""

from offload.engines import Engine
from offload.lanes.accelerator import AcceleratorLane
from offload.lanes.base import DONE, Fence, Lane, Passage
from offload.lanes.cpu import CpuLane
from offload.lanes.order import open_order
from offload.lanes.pinning import Pinner, cpus_near, on_cpus, pinner_for

__all__ = [
    "DONE",
    "Fence",
    "Lane",
    "Passage",
    "Pinner",
    "cpus_near",
    "on_cpus",
    "open_lane",
    "pinner_for",
]


def open_lane(device_type: str, engine: Engine) -> Lane:
    """A lane for the devices of one type: ``"cpu"``, or an accelerator's."""
    return CpuLane(engine) if device_type == "cpu" else AcceleratorLane(engine, open_order())
