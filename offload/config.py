"""Config: every option of a session, checked where it is given."""

import os
import tempfile
from collections.abc import Mapping
from typing import Any, Literal

import attrs
import torch
from attrs import Attribute, Converter, field

from offload.optionfile import read_options, what_there_is
from offload.system.machine import (
    available_memory_bytes,
    filesystem_of,
    local_processes,
    total_memory_bytes,
)
from offload.system.pool import Allocator
from offload.units import MIB, format_bytes, parse_bytes


def _to_bytes(value: int | str, attribute: "Attribute[Any]") -> int:
    return parse_bytes(value, attribute.name)


def _to_bytes_or_none(value: int | str | None, attribute: "Attribute[Any]") -> int | None:
    return None if value is None else parse_bytes(value, attribute.name)


def _to_directory(value: str | os.PathLike[str] | None) -> str:
    """An existing, writable directory: the one given, else ``$OFFLOAD_DIR``, else the temporary
    directory.
    """
    given = value if value is not None else os.environ.get("OFFLOAD_DIR") or tempfile.gettempdir()
    if not isinstance(given, (str, os.PathLike)):
        raise TypeError(f"disk_dir is {given!r} ({type(given).__name__}); give a path as text")
    name = os.fsdecode(given)
    if not name:
        raise ValueError("disk_dir is empty; name a directory, or leave it out")
    path = os.path.abspath(os.path.expanduser(name))
    if not os.path.isdir(path):
        found = "is not a directory" if os.path.exists(path) else "does not exist"
        raise ValueError(
            f"disk_dir {path!r} {found}; create it or name another one (also by $OFFLOAD_DIR)"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ValueError(
            f"disk_dir {path!r} is not writable by this user; choose another directory"
        )
    return path


def _to_device_budget(value: int | str | None) -> int | str | None:
    """``"auto"`` waits for the device to be known."""
    return value if value is None or value == "auto" else parse_bytes(value, "device_budget")


def _whole_device(device: torch.device) -> int:
    """What a step may take of the device: all but a tenth, or half of the host memory that is
    available.
    """
    if device.type == "cpu":
        return available_memory_bytes() // 2
    _, total_bytes = torch.accelerator.get_memory_info(device)
    return total_bytes // 10 * 9


def _size(default: int | None) -> Any:
    convert = _to_bytes if default is not None else _to_bytes_or_none
    return field(default=default, converter=Converter(convert, takes_field=True))


def _one_of(*choices: object) -> Any:
    def check(_: object, attribute: "Attribute[Any]", value: object) -> None:
        if not any(value is c or (value == c and type(value) is type(c)) for c in choices):
            listed = ", ".join(repr(c) for c in choices)
            raise ValueError(f"{attribute.name} is {value!r}; choose one of {listed}")

    return check


def _to_device(value: str | torch.device | None) -> torch.device:
    """The one given, else the machine's accelerator, else the CPU."""
    if value is None:
        accelerator = _accelerator()
        return accelerator if accelerator is not None else torch.device("cpu")
    if not isinstance(value, (str, torch.device)):
        raise TypeError(f"device is {value!r} ({type(value).__name__}); give a text like 'cuda:0'")
    try:
        device = torch.device(value)
    except RuntimeError as e:
        raise ValueError(f"device is {value!r}, which torch does not know: {e}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    accelerator = _accelerator()
    if accelerator is None or accelerator.type != device.type:
        has = f"{accelerator.type!r} and 'cpu'" if accelerator is not None else "'cpu' only"
        raise ValueError(f"device is {value!r}, but this machine and its torch have {has}")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise ValueError(f"device is {value!r}, but there are {count} devices, counted from 0")
    return device


def _to_threads(value: int | None) -> int:
    """The number given; else two, or one where several processes do I/O side by side
    (``scripts/bench_ranks.py``).
    """
    return value if value is not None else (2 if local_processes() == 1 else 1)


def _accelerator() -> torch.device | None:
    """The kind of accelerator here. One that shares the host's memory (mps) is none for us."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if device is None or device.type == "mps" else torch.device(device.type)


@attrs.frozen(kw_only=True)
class Config:
    """The options of a ``Session``. Sizes take bytes as an int or a text like ``"8GiB"``.

    Args:
        device: whose activations are managed. ``"cpu"``: they go from memory to disk. ``"cuda"``
            or another accelerator: from all devices of that kind to host memory, and on to the
            disk when that runs short; ``"cuda:1"``: from that one only. ``None``: the machine's
            accelerator, or the CPU if there is none.
        engine: ``"native"`` (C++) or ``"aio"`` (Python, works without a compiler). ``None``: native
            where the extension was built, else aio with one warning.
        disk_dir: directory of the scratch file. ``None``: ``$OFFLOAD_DIR``, else the system's
            temporary directory. The file never has a name, so nothing of it survives the process.
        disk_budget: most bytes of the scratch files of all processes on this machine, each of
            which takes an equal share. ``None``: what the file system has.
        host_budget: most bytes of host memory that hold copies on their way out or back, shared
            like ``disk_budget``. ``None``: on ``"cpu"`` twice ``window_bytes + prefetch_bytes`` of
            each process, as operators work in it, too; with an accelerator, half of what is
            available now. It is taken and pinned as need grows.
        budget_scope: ``"node"``: the two budgets are those of this machine, and divided by the
            processes on it (``$LOCAL_WORLD_SIZE``, which torchrun sets). ``"rank"``: they are those
            of this process.
        plan_scope: ``"group"``: ranks that share a model make one plan for ``device_budget``, from
            the slowest times and largest bytes among them, as all have to recompute the same where
            that runs collectives. ``"rank"``: each makes its own.
        device_budget: most bytes of device memory. On an accelerator of all that its allocator has
            given out; on ``"cpu"`` of saved activations with the host memory above. A plan keeps
            to it by what it chooses (``Session.apply``); without one, whatever would pass it
            leaves. ``"auto"``: all but a tenth of the accelerator, half of the memory available.
            ``None``: no limit.
        min_offload_bytes: storages smaller than this stay where they are.
        bundle_bytes: storages smaller than 1/16 of this leave and come back together, so many
            bytes at a time; of what a forward saves last, less than that stays. ``None``: 4 MiB, or
            as much as a quarter of each window holds; none where ``min_offload_bytes`` is 0, which
            sends each out by itself. 0: none. Under a plan or a ``device_budget`` there are none.
        window_bytes: most bytes on their way out at one time: of storages being copied from an
            accelerator, of slots being written on ``"cpu"``. The forward waits when it is reached.
            A storage may go with as many others as take up no more than its own size, so that
            one is copied while another is written.
        prefetch_bytes: most bytes brought back before backward has asked for them, together with
            the storage it has asked for last. As above, two that are large may come. 0: none.
        keep_last_bytes: the newest saved bytes stay where they are, as backward asks for them at
            once. The newest storage stays even if it is larger; 0 sends everything out at once.
        allocator: where torch's large tensors on ``"cpu"`` have their memory, of this process and
            for its life. ``"pool"``: of ours, which uses at once what offloading frees.
            ``"system"``: of the C library, as without a session; the process then hardly gets
            smaller. ``None``: the pool, unless another allocator (jemalloc, a sanitizer) was put
            in the C library's place.
        verify: check a CRC of every block that comes back from the disk.
        verify_recompute: compare every value that rules and ``offload.checkpoint`` recompute in the
            session's steps with what the forward had; ``Session.recompute_report`` tells. To find
            out why gradients differ: the values of the forward wait on the tiers as well.
        on_error: what a failed write does. ``"keep"``: the tensor stays in memory and the step
            goes on; one warning and the report say so. ``"raise"``: the same, and the step raises
            ``StorageError`` at its end.
        io_threads: threads that read and write. ``None``: two, or one where several processes
            share this machine, which are as fast together.
        io_block_bytes: the largest single read or write.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: a value that cannot work; the message says the fix.

    Example:
        >>> Config(window_bytes="32MiB", disk_dir="/tmp").window_bytes
        33554432
    """

    device: torch.device = field(default=None, converter=_to_device)
    engine: Literal["native", "aio"] | None = field(
        default=None, validator=_one_of(None, "native", "aio")
    )
    disk_dir: str = field(default=None, converter=_to_directory)
    disk_budget: int | None = _size(None)
    host_budget: int | None = _size(None)
    budget_scope: Literal["node", "rank"] = field(default="node", validator=_one_of("node", "rank"))
    plan_scope: Literal["group", "rank"] = field(
        default="group", validator=_one_of("group", "rank")
    )
    device_budget: int | None = field(default=None, converter=_to_device_budget)
    min_offload_bytes: int = _size(1 * MIB)
    bundle_bytes: int | None = _size(None)
    window_bytes: int = _size(32 * MIB)
    prefetch_bytes: int = _size(68 * MIB)
    keep_last_bytes: int = _size(16 * MIB)
    allocator: Allocator | None = field(default=None, validator=_one_of(None, "pool", "system"))
    verify: bool = field(default=False, validator=_one_of(True, False))
    verify_recompute: bool = field(default=False, validator=_one_of(True, False))
    on_error: Literal["keep", "raise"] = field(default="keep", validator=_one_of("keep", "raise"))
    io_threads: int = field(default=None, converter=_to_threads)
    io_block_bytes: int = _size(8 * MIB)

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Config":
        """These options, whose names somebody may have mistyped.

        Raises:
            TypeError: there is no such option, or a value is of the wrong type.
            ValueError: a value cannot work; the message says the fix.

        Example:
            >>> Config.of({"window_byte": 4096})
            Traceback (most recent call last):
            TypeError: a session has no option 'window_byte'; did you mean 'window_bytes'?
        """
        names = [f.name for f in attrs.fields(cls)]
        for name in options:
            if name not in names:
                hint = what_there_is(name, names)
                raise TypeError(f"a session has no option {name!r}; {hint}")
        return cls(**options)

    @classmethod
    def given(cls, config: "Config | None", options: Mapping[str, Any]) -> "Config":
        """What a caller gave who may give a config, or else its options by name.

        Raises:
            TypeError, ValueError: both, or as ``of``.
        """
        if config is None:
            return cls.of(options)
        if options:
            raise TypeError(f"give either a Config or options, not both ({', '.join(options)})")
        if not isinstance(config, Config):
            raise TypeError(f"config is {config!r}; give a Config, or options by name")
        return config

    @classmethod
    def from_file(cls, path: "str | os.PathLike[str]", **options: Any) -> "Config":
        r"""The options in the table ``[session]`` of a TOML file, which ``offload tune`` writes.

        Args:
            path: of the file.
            **options: further ones; they go before the file's.

        Raises:
            OSError: the file cannot be read.
            TypeError, ValueError: it is no such file, or an option of it cannot work.

        Example:
            >>> import pathlib, tempfile
            >>> path = pathlib.Path(tempfile.mkdtemp(), "offload.toml")
            >>> _ = path.write_text('[session]\nwindow_bytes = "64MiB"')
            >>> Config.from_file(path, io_threads=4).window_bytes
            67108864
        """
        return cls(**{**read_options(path, (f.name for f in attrs.fields(cls))), **options})

    @property
    def arena_bytes(self) -> int:
        """Host memory for bytes on their way or at rest: this process's share of ``host_budget``,
        or its default.
        """
        if self.host_budget is not None:
            return self.host_budget // self._shares
        windows_bytes = self.window_bytes + self.prefetch_bytes
        if self.device.type == "cpu":
            # A slab costs nothing until it is touched, and the budget counts what is. The windows
            # bound what is on its way; what backward works on stays in its slots meanwhile.
            return max(
                2 * windows_bytes, min(self.device_budget or 0, available_memory_bytes() // 2)
            )
        return max(windows_bytes, available_memory_bytes() // 2 // local_processes())

    @property
    def bundled_bytes(self) -> int:
        """Bytes of a bundle of small storages; 0: there are none."""
        if self.bundle_bytes is not None:
            return self.bundle_bytes
        if not self.min_offload_bytes:
            return 0
        return min(4 * MIB, self.window_bytes // 4, self.prefetch_bytes // 4)

    @property
    def disk_bytes(self) -> int | None:
        """Most bytes of this process's scratch file; ``None``: what the file system has."""
        return None if self.disk_budget is None else self.disk_budget // self._shares

    @property
    def _shares(self) -> int:
        return local_processes() if self.budget_scope == "node" else 1

    @io_threads.validator
    def _check_io_threads(self, _: object, value: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"io_threads is {value!r}; give an int")
        if not 1 <= value <= 64:
            raise ValueError(f"io_threads is {value}; give 1 to 64 (2 to 4 saturate one disk)")

    def __attrs_post_init__(self) -> None:
        budget: object = self.device_budget
        if budget == "auto":
            object.__setattr__(self, "device_budget", _whole_device(self.device))
        for name in ("window_bytes", "io_block_bytes"):
            if getattr(self, name) < 4096:
                raise ValueError(f"{name} is {getattr(self, name)}; give at least 4096 bytes")
        shares = self._shares
        if self.host_budget is not None and self.host_budget // shares < self.window_bytes:
            among = f" shared by {shares} processes" if shares > 1 else ""
            raise ValueError(
                f"host_budget is {format_bytes(self.host_budget)}{among}, less than window_bytes "
                f"of {format_bytes(self.window_bytes)}: lower window_bytes or raise host_budget"
            )

        memory_bytes = total_memory_bytes()
        windows_bytes = (self.window_bytes + self.prefetch_bytes) * local_processes()
        wanted_bytes = self.host_budget or windows_bytes
        if wanted_bytes > memory_bytes:
            named = "host_budget is" if self.host_budget else "window_bytes and prefetch_bytes are"
            raise ValueError(
                f"{named} {format_bytes(wanted_bytes)}, more than the {format_bytes(memory_bytes)} "
                "of memory that this process may use"
            )

    def warnings(self) -> list[str]:
        """What will work, but hardly as meant."""
        filesystem = filesystem_of(self.disk_dir)
        if not filesystem.in_memory:
            return []
        return [
            f"disk_dir {self.disk_dir!r} is on {filesystem.kind}, which keeps files in memory: "
            "offloading there frees nothing; name a directory on a disk"
        ]
