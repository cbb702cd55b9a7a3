"""The hard cases of ``tests/cases`` on the simulated accelerator, in each configuration.

The programs are the same: what they make on the CPU is made on the device instead. Copies run in a
random order, so one that is still on its way is the rule here.
"""

import gc
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import simdev
import torch
from offloading import CONFIGURATIONS, SINGLY, SMALL_WINDOWS, open_engine
from torch.utils._device import DeviceContext, _device_constructors

import offload
from tests.conftest import close_and_check
from tests.support import drain

MODULES = (
    "attacks", "autograd", "checkpoint", "compile", "in_place", "lifetime", "models", "views",
)  # fmt: skip

# What is left out, and why.
LEFT_OUT = {
    "test_memory_that_is_not_torchs": "that memory is the host's",
    "test_numpy_array_filled_again_between_graphs": "numpy's memory is the host's",
    "test_statistics_and_arrays_that_change_without_notice": "numpy's memory is the host's",
    "test_kinds_without_plain_bytes_stay": "the simulator has no sparse tensors",
    "test_recurrent_network": "the simulator has no fused LSTM cell",
    "test_convolutions_batch_norm_and_pooling": "the simulator's batch norm is for training only",
    "test_step_inside_a_compiled_function": "the compiler traces MadeOnDevice as well",
    "test_retained_graph_does_not_fill_memory_again": "test_lifetime.py has it for device memory",
    "test_dropped_graph_does_not_fill_the_memory_of_another": "what is alive rests in host memory",
}
# A saved tensor is changed or freed while its copy out may be on its way. That is a race, on bytes
# that unpack then refuses to give, or that are of another tensor of the same storage.
RACES = {
    "test_storage_resized_after_it_was_saved",
    "test_one_storage_under_two_counters",
    "test_boundary_changed_in_place",
    "test_changed_after_it_was_saved",
    "test_changed_through_a_view_of_it",
    "test_found_wherever_the_tensor_waits",
    "test_two_versions_of_one_storage",
    "test_parts_with_version_counters_of_their_own",
    "test_parts_saved_through_data",
    "test_backward_works_in_place_on_what_it_saved",
    "test_backward_spoils_what_another_one_needs",
    "test_backward_spoils_what_it_needs_again",
}

for module in MODULES:
    for name, case in vars(importlib.import_module(f"tests.cases.test_{module}")).items():
        if name.startswith("test_") and name not in LEFT_OUT:
            globals()[f"test_{module}{name.removeprefix('test')}"] = case


class MadeOnDevice(DeviceContext):
    """Tensors are made on the device, with the values that a generator of the CPU gives."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Generator:
            return func(*args, **kwargs)
        if "generator" in kwargs and func in _device_constructors():
            return func(*args, **kwargs).to(self.device)
        return super().__torch_function__(func, types, args, kwargs)


@pytest.fixture(autouse=True)
def _made_on_device(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, _fresh_device: None
) -> Iterator[None]:
    """On every thread of the test, whose modes are its own."""
    run = threading.Thread.run

    def run_with_mode(thread: threading.Thread) -> None:
        with MadeOnDevice(torch.device("sim")):
            run(thread)

    monkeypatch.setattr(threading.Thread, "run", run_with_mode)
    simdev.configure(scheduler=simdev.Scheduler.RANDOM, seed=1)
    with MadeOnDevice(torch.device("sim")):
        yield
    if request.function.__name__ in RACES:
        assert all("write after read" in race and "copy D2H" in race for race in simdev.races())


@pytest.fixture
def engine() -> str:
    """One will do: the lanes are the same for both."""
    return "native"


# The cases count what leaves: each by itself.
@pytest.fixture(params=SINGLY)
def open_session(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """As for the CPU, in each configuration."""
    opened: list[offload.Session] = []

    def opener(**options: Any) -> offload.Session:
        options.pop("engine")
        options = {
            "device": "sim", "disk_dir": tmp_path, "min_offload_bytes": 0, "keep_last_bytes": 0,
            **SMALL_WINDOWS, **CONFIGURATIONS[request.param], **options,
        }  # fmt: skip
        opened.append(offload.Session(**options, _engine=open_engine(str(tmp_path))))
        return opened[-1]

    yield opener
    gc.collect()
    while opened:
        drain(opened[-1])
        close_and_check(opened.pop(), passed=True)
