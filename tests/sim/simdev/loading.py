"""Loads the backend into torch."""

import atexit
import functools
import importlib.machinery
import importlib.util
import shutil
import types
from typing import Any

import torch
from torch.utils.backend_registration import (
    generate_methods_for_privateuse1_backend,
    rename_privateuse1_backend,
)

from .build import NAME, build

TORCH_VERSION = "2.13"


def why_unavailable() -> str | None:
    """Why the backend cannot be loaded here; None if nothing speaks against it."""
    if not torch.__version__.startswith(TORCH_VERSION + "."):
        return f"simdev uses internals of torch {TORCH_VERSION}; this is {torch.__version__}"
    if shutil.which("g++") is None:
        return "simdev needs a C++ compiler, and g++ was not found"
    return None


@functools.cache
def native() -> Any:
    """The extension module; loads it, and with it the backend, on first use."""
    reason = why_unavailable()
    if reason is not None:
        raise RuntimeError(reason)
    path = str(build())
    loader = importlib.machinery.ExtensionFileLoader(NAME, path)
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    _register(module)
    # Tasks that still wait must not meet an interpreter that is half gone.
    atexit.register(module.shutdown)
    return module


def load() -> None:
    """Build the backend if need be, load it and make it torch's accelerator, named ``"sim"``.

    May be called again. There is no way back: torch keeps a backend for good.

    Raises:
        RuntimeError: :func:`why_unavailable` says why.
        BuildError: the message is what the compiler printed.
    """
    native()


def _register(module: Any) -> None:
    rename_privateuse1_backend("sim")
    torch._register_device_module("sim", _device_module(module))  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend(for_storage=True)


class _Device:
    """The context manager ``torch.sim.device``; there is one device."""

    def __init__(self, device: object = None) -> None: ...

    def __enter__(self) -> "_Device":
        return self

    def __exit__(self, *_: object) -> None: ...


def _device_module(module: Any) -> types.ModuleType:
    """``torch.sim``: what torch's own Python code asks the module of a device for."""
    functions: dict[str, Any] = {
        "device": _Device,
        "_initialized": True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "current_stream": lambda device=None: torch.accelerator.current_stream(),
        "Stream": lambda device=None, priority=0: torch.Stream("sim"),
        "Event": lambda *_, **__: torch.Event("sim"),
        "stream": lambda stream: stream,  # is a context manager
        "synchronize": lambda device=None: torch.accelerator.synchronize(),
        "manual_seed": module.manual_seed,
        "manual_seed_all": module.manual_seed,
        "get_rng_state": lambda device=None: module.get_rng_state(),
        "set_rng_state": lambda state, device=None: module.set_rng_state(state.cpu()),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    sim = types.ModuleType("torch.sim")
    vars(sim).update(functions)
    return sim
