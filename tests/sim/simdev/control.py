"""What a test can set: schedulers, speeds, capacity and faults."""

import dataclasses
import enum
from dataclasses import dataclass

from .loading import native


class Scheduler(enum.Enum):
    """In which order queued tasks run, as far as streams and events leave a choice."""

    EAGER = 0
    """At once, on the thread that queues. Nothing is asynchronous; good for a first look."""
    THREADS = 1
    """One thread per stream, in real time."""
    LAZY = 2
    """As late as possible: only what a host synchronisation waits for."""
    RANDOM = 3
    """Like LAZY, but random streams make progress whenever something is queued. Repeatable, as
    long as one thread queues at a time."""


class Direction(enum.Enum):
    """Of a copy between host and device."""

    H2D = 0
    D2H = 1


@dataclass(frozen=True)
class Config:
    """What :func:`configure` sets, with the defaults."""

    scheduler: Scheduler = Scheduler.EAGER
    seed: int = 0
    async_operators: bool = True
    detect_races: bool = True
    poison: bool = True
    guard_host: bool = False
    d2h_bytes_per_s: float = 25e9
    h2d_bytes_per_s: float = 25e9
    hbm_bytes_per_s: float = 2e12
    flops_per_s: float = 200e12
    launch_ns: int = 4000
    copy_latency_ns: int = 8000
    min_kernel_ns: int = 3000
    timed_queries: bool = False
    sleep_scale: float = 0.0
    capacity_bytes: int = 8 << 30


_NAMES = [field.name for field in dataclasses.fields(Config)]


def config() -> Config:
    """The current configuration."""
    raw = native().config()
    values = {name: getattr(raw, name) for name in _NAMES}
    return Config(**{**values, "scheduler": Scheduler(values["scheduler"])})


def configure(
    *,
    scheduler: Scheduler | None = None,
    seed: int | None = None,
    async_operators: bool | None = None,
    detect_races: bool | None = None,
    poison: bool | None = None,
    guard_host: bool | None = None,
    d2h_bytes_per_s: float | None = None,
    h2d_bytes_per_s: float | None = None,
    hbm_bytes_per_s: float | None = None,
    flops_per_s: float | None = None,
    launch_ns: int | None = None,
    copy_latency_ns: int | None = None,
    min_kernel_ns: int | None = None,
    timed_queries: bool | None = None,
    sleep_scale: float | None = None,
    capacity_bytes: int | None = None,
) -> None:
    """Run all that is queued, then change what is given and leave the rest.

    What ran before the call is ordered before all that comes after it. No other thread may use the
    device meanwhile.

    Args:
        scheduler: the order of tasks.
        seed: of ``Scheduler.RANDOM``. Each call of configure starts its random numbers again.
        async_operators: with False the host waits for every operator (copies are not affected).
        detect_races: see :func:`simdev.races`.
        poison: fill device memory with 0xFF (NaN) when it is allocated and when it is freed.
        guard_host: let the host fault (SIGSEGV) on pinned memory that a copy in flight writes, and
            on writing what it reads. Only memory that torch pinned, and only whole pages.
        d2h_bytes_per_s: rate of the link from the device, one copy at a time.
        h2d_bytes_per_s: rate of the link to the device, one copy at a time.
        hbm_bytes_per_s: rate at which a kernel reads its arguments and writes its results.
        flops_per_s: rate of matrix products and attention. A kernel takes the longer of both times.
        launch_ns: virtual time the host spends on queueing a kernel or copy.
        copy_latency_ns: added to each copy over the link.
        min_kernel_ns: a kernel takes at least this long.
        timed_queries: tell by the virtual clock whether an event or stream is done, as a device of
            these speeds would, and not by which tasks have run. With ``Scheduler.EAGER`` this is
            the device to measure overlap on. A query that says no takes the host 500 ns.
        sleep_scale: ``Scheduler.THREADS`` only: tasks sleep for this multiple of their virtual
            duration before they do their work. 0 does not sleep.
        capacity_bytes: device memory; more raises torch.OutOfMemoryError.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    _check(given)
    raw = native().config()
    for name, value in given.items():
        setattr(raw, name, value.value if isinstance(value, Scheduler) else value)
    native().configure(raw)


def _check(given: dict[str, object]) -> None:
    for name, value in given.items():
        if name.endswith("_per_s"):
            assert isinstance(value, int | float)
            if not value > 0:
                raise ValueError(f"{name} must be positive, not {value}")
        elif name.endswith(("_ns", "_bytes", "_scale", "seed")):
            assert isinstance(value, int | float)
            if value < 0:
                raise ValueError(f"{name} must not be negative, but is {value}")


def reset() -> None:
    """Run all that is queued, then forget configuration, races, errors, faults and counters.

    Caches of memory are emptied. Virtual time starts from 0, peaks from what is allocated now.
    Tensors stay valid and foreign memory stays registered. No other thread may use the device
    meanwhile.
    """
    native().reset()


def inject_copy_fault(direction: Direction, nth: int = 1) -> None:
    """Let a copy fail: the ``nth`` in that direction that is queued from now on (1 is the next).

    It moves no bytes. The first host synchronisation after it ran raises RuntimeError. A second
    call replaces the first.
    """
    if nth < 1:
        raise ValueError(f"nth must be at least 1, not {nth}")
    native().inject_copy_fault(direction is Direction.D2H, nth)
