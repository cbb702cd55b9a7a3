"""A simulated accelerator for tests: torch's device ``"sim"``, in one process, without hardware.

Operators and copies run on the CPU, but as tasks on streams: asynchronous, ordered by nothing but
streams and events, on memory that the host cannot touch. On top of that come instruments that no
accelerator has: schedulers that try orders which hardware rarely shows, a detector of races that
does not depend on the order, a virtual clock, counters and faults.

>>> import simdev
>>> simdev.load()                                           # doctest: +SKIP
>>> simdev.configure(scheduler=simdev.Scheduler.RANDOM, seed=1)  # doctest: +SKIP
>>> x = torch.ones(3, device="sim")                         # doctest: +SKIP

Everything but :func:`load` and :func:`why_unavailable` needs the backend to be loaded.
"""

from .build import BuildError
from .control import (
    Config,
    Direction,
    Scheduler,
    config,
    configure,
    inject_copy_fault,
    reset,
)
from .instruments import (
    Copies,
    HostSyncs,
    Memory,
    Stats,
    advance_host_ns,
    host_access,
    host_acquire,
    host_register,
    host_release,
    host_unregister,
    host_virtual_time_ns,
    own_host_clock,
    races,
    stats,
    virtual_time_ns,
)
from .loading import load, why_unavailable

__all__ = [
    "load",
    "why_unavailable",
    "BuildError",
    "Scheduler",
    "Direction",
    "Config",
    "config",
    "configure",
    "reset",
    "inject_copy_fault",
    "races",
    "host_access",
    "host_register",
    "host_unregister",
    "own_host_clock",
    "host_release",
    "host_acquire",
    "virtual_time_ns",
    "host_virtual_time_ns",
    "advance_host_ns",
    "stats",
    "Stats",
    "HostSyncs",
    "Copies",
    "Memory",
]
