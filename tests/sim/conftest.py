"""Tests on the simulated accelerator, for a process of their own: ``pytest tests/sim``.

torch keeps a backend for good, and from then on has an accelerator, so these tests stay out of runs
that do not name them.
"""

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # so that "simdev" is found
sys.path += [str(Path(__file__).parents[2] / "scripts"), str(Path(__file__).parents[1] / "gpu")]

import simdev

HERE = Path(__file__).parent

collect_ignore = ["simdev"]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect nothing unless the command line names this folder or something in it."""
    named = [Path(config.invocation_params.dir, arg.split("::")[0]) for arg in config.args]
    return None if any(path.resolve().is_relative_to(HERE) for path in named) else True


@pytest.fixture(scope="session")
def _backend() -> None:
    reason = simdev.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    simdev.load()
    torch.ones(2, 2, device="sim").neg()  # imports the Python part of torch's Meta kernels
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.freeze()  # all that was imported: the collections below then take no time


@pytest.fixture(autouse=True)
def _fresh_device(_backend: None) -> Iterator[None]:
    """The defaults before each test, and no race that nobody has looked at after it."""
    gc.collect()
    simdev.reset()
    yield
    torch.accelerator.synchronize()
    assert simdev.races() == []


@pytest.fixture(params=list(simdev.Scheduler), ids=lambda scheduler: scheduler.name.lower())
def scheduler(request: pytest.FixtureRequest, _fresh_device: None) -> simdev.Scheduler:
    """Each scheduler in turn, configured."""
    simdev.configure(scheduler=request.param)
    return request.param
