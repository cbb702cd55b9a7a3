"""Every option, and every way to get one wrong: the message names option, value and fix."""

import os
import re
import stat
from pathlib import Path

import attrs
import pytest
import torch

import offload
from offload import Config
from offload.units import format_bytes, format_seconds, parse_bytes

OPTIONAL_SIZES = ["bundle_bytes", "disk_budget", "host_budget"]
SIZES = [
    f.name
    for f in attrs.fields(Config)
    if f.name.endswith("_bytes") and f.name not in OPTIONAL_SIZES
]


@pytest.mark.parametrize("name", SIZES + OPTIONAL_SIZES)
@pytest.mark.parametrize(
    ("given", "nbytes"),
    [
        (1 << 27, 1 << 27),
        ("128MiB", 1 << 27),
        ("128 mib", 1 << 27),
        ("134217728", 1 << 27),
        ("100MB", 100_000_000),
        ("0.5GiB", 1 << 29),
    ],
)
def test_sizes_as_numbers_and_texts(name: str, given: int | str, nbytes: int) -> None:
    assert getattr(Config(**{name: given}), name) == nbytes


@pytest.mark.parametrize("name", SIZES + OPTIONAL_SIZES)
@pytest.mark.parametrize("value", ["lots", "", "-1MiB", -1])
def test_sizes_that_are_none(name: str, value: int | str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {re.escape(repr(value))}"):
        Config(**{name: value})


@pytest.mark.parametrize("value", ["12 parsecs", "8 Gallons", "1 Kilo", "8MiBi"])
def test_units_that_are_none(value: str) -> None:
    with pytest.raises(ValueError, match=f"window_bytes is {re.escape(repr(value))}"):
        Config(window_bytes=value)


@pytest.mark.parametrize("name", SIZES + OPTIONAL_SIZES)
@pytest.mark.parametrize("value", [1.5, True, b"1MiB", [1]])
def test_sizes_of_another_type(name: str, value: object) -> None:
    with pytest.raises(TypeError, match=f"{name} is {re.escape(repr(value))}.*give"):
        Config(**{name: value})


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_must_be_given(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is None"):
        Config(**{name: None})


@pytest.mark.parametrize("name", OPTIONAL_SIZES)
def test_sizes_that_may_be_left_open(name: str) -> None:
    assert getattr(Config(**{name: None}), name) is None


@pytest.mark.parametrize("name", ["window_bytes", "io_block_bytes"])
def test_sizes_with_a_least_value(name: str) -> None:
    assert getattr(Config(**{name: 4096}), name) == 4096
    with pytest.raises(ValueError, match=f"{name} is 4095; give at least 4096"):
        Config(**{name: 4095})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("engine", [None, "native", "aio"], ["Native", "", 1, "uring"]),
        ("verify", [True, False], [1, 0, "yes", None]),
        ("on_error", ["keep", "raise"], ["ignore", None, True]),
    ],
)
def test_choices(name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        assert getattr(Config(**{name: value}), name) == value
    for value in bad:
        with pytest.raises(ValueError, match=f"{name} is {re.escape(repr(value))}; choose one of"):
            Config(**{name: value})


def test_io_threads() -> None:
    assert Config(io_threads=1).io_threads == 1
    for value in (0, 65, -1):
        with pytest.raises(ValueError, match=f"io_threads is {value}; give 1 to 64"):
            Config(io_threads=value)
    for value in (True, 2.0, "2"):
        with pytest.raises(TypeError, match=r"io_threads is .*; give an int"):
            Config(io_threads=value)


def test_device() -> None:
    assert Config(device="cpu").device == torch.device("cpu")
    assert Config(device=torch.device("cpu")).device == torch.device("cpu")
    assert Config().device == torch.device("cpu"), "there is no accelerator here"
    for value in ("cuda", "cuda:0", "banana", "cpuu", ""):
        with pytest.raises(ValueError, match=f"device is '{value}'"):
            Config(device=value)


def test_budget_smaller_than_the_window() -> None:
    assert Config(host_budget="8MiB", window_bytes="8MiB").arena_bytes == 8 << 20
    assert Config(window_bytes="8MiB", prefetch_bytes="1MiB").arena_bytes == 18 << 20
    with pytest.raises(ValueError, match="host_budget is 1 MiB, less than window_bytes of 2 MiB"):
        Config(host_budget="1MiB", window_bytes="2MiB")


def test_directory_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config(disk_dir=tmp_path).disk_dir == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "below").mkdir()
    assert Config(disk_dir="below").disk_dir == str(tmp_path / "below")


def test_directory_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFLOAD_DIR", str(tmp_path))
    assert Config().disk_dir == str(tmp_path)
    monkeypatch.setenv("OFFLOAD_DIR", "")
    assert os.path.isdir(Config().disk_dir)
    monkeypatch.setenv("OFFLOAD_DIR", "/no/such")
    with pytest.raises(ValueError, match=r"disk_dir '/no/such' does not exist.*OFFLOAD_DIR"):
        Config()


def test_directory_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ValueError, match=r"disk_dir .* is not a directory"):
        Config(disk_dir=file)
    for value in (5, b"/tmp", ["/tmp"]):
        with pytest.raises(TypeError, match="disk_dir is"):
            Config(disk_dir=value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_that_is_read_only(tmp_path: Path) -> None:
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(ValueError, match=r"disk_dir .* is not writable"):
        Config(disk_dir=tmp_path)


def test_unknown_option_and_positional() -> None:
    with pytest.raises(TypeError, match="window_byte"):
        Config(window_byte=1)
    with pytest.raises(TypeError):
        Config("cpu")


def test_frozen_and_comparable(tmp_path: Path) -> None:
    config = Config(disk_dir=tmp_path)
    with pytest.raises(AttributeError):
        config.verify = True
    assert config == Config(disk_dir=str(tmp_path))
    assert config != Config(disk_dir=tmp_path, verify=True)


def test_warning_for_a_directory_in_memory() -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs here")
    (message,) = Config(disk_dir="/dev/shm").warnings()
    assert "'/dev/shm' is on tmpfs" in message
    assert "name a directory on a disk" in message


def test_session_takes_a_config_or_options(tmp_path: Path) -> None:
    import offload

    with pytest.raises(TypeError, match=r"either a Config or options, not both \(verify\)"):
        offload.Session(Config(disk_dir=tmp_path), verify=True)


def test_printing() -> None:
    assert [format_bytes(n) for n in (0, 1, 4096, 3 << 29)] == [
        "0 bytes", "1 byte", "4 KiB", "1.5 GiB"
    ]  # fmt: skip
    assert [format_seconds(s) for s in (0, 2e-6, 0.5, 90)] == [
        "0 us",
        "2 us",
        "500.0 ms",
        "90.00 s",
    ]
    assert parse_bytes(" 1 KiB ", "x") == 1024


@pytest.mark.parametrize("name", [*SIZES, *OPTIONAL_SIZES])
@pytest.mark.parametrize("value", [1 << 64, "2000PiB"])
def test_sizes_beyond_any_machine(name: str, value: int | str) -> None:
    with pytest.raises(ValueError, match=f"{name} is {re.escape(repr(value))}; no machine"):
        Config(**{name: value})


@pytest.mark.parametrize("name", ["window_bytes", "prefetch_bytes", "host_budget"])
def test_sizes_beyond_this_machine(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}.* more than the .*of memory that this process"):
        Config(**{name: "1PiB"})


@pytest.mark.parametrize("value", [b"cpu", True, 7, 1.5])
def test_device_of_another_type(value: object) -> None:
    with pytest.raises(TypeError, match=f"device is {re.escape(repr(value))}.*'cuda:0'"):
        Config(device=value)


def test_directory_that_is_empty_or_at_home(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(ValueError, match="disk_dir is empty"):
        Config(disk_dir="")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Config(disk_dir="~").disk_dir == str(tmp_path)


def test_digits_of_other_scripts() -> None:
    with pytest.raises(ValueError, match="window_bytes is '٣MiB', which is no size"):
        Config(window_bytes="٣MiB")


@pytest.mark.parametrize("engine", ["native", "aio"])
def test_io_blocks_are_whole_pages(engine: str, tmp_path: Path) -> None:
    options = {"engine": engine, "disk_dir": tmp_path, "io_block_bytes": 5000}
    options |= {"min_offload_bytes": 0, "keep_last_bytes": 0}
    x = torch.linspace(0, 1, 1 << 14).requires_grad_()
    with offload.Session(**options) as session, session.step():
        x.sin().sin().sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("config", ["/tmp", {}])
def test_session_of_something_else(config: object) -> None:
    with pytest.raises(TypeError, match="give a Config, or options by name"):
        offload.Session(config)


@pytest.mark.parametrize("policy", [None, "disk", offload.Placement.DISK])
def test_policy_that_is_no_function(policy: object) -> None:
    with pytest.raises(TypeError, match=re.escape(f"policy is {policy!r}; give a function")):
        offload.Session(policy=policy)


@pytest.mark.parametrize("answer", [None, "disk", "DISK"])
def test_policy_that_does_not_answer(answer: object, tmp_path: Path) -> None:
    x = torch.ones(1 << 12, requires_grad=True)
    policy = lambda tensor: answer  # noqa: E731
    with offload.Session(policy=policy, disk_dir=tmp_path, min_offload_bytes=0) as session:
        refused = pytest.raises(TypeError, match=f"policy returned {answer!r}; return a Placement")
        with refused, session.step():
            x.sin()
        with session.step():
            pass


def test_an_exception_is_not_hidden_by_an_open_step(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="mine"), offload.Session(disk_dir=tmp_path) as session:
        step = session.step()
        step.__enter__()
        raise KeyError("mine")
    step.__exit__(None, None, None)
    session.close()


def test_processes_of_a_machine_share_its_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read when they are used, so that a configuration can be made before the ranks are."""
    config = Config(host_budget="256MiB", disk_budget="1GiB", device="cpu")
    own = Config(host_budget="256MiB", disk_budget="1GiB", device="cpu", budget_scope="rank")
    assert (config.arena_bytes, config.disk_bytes) == (256 << 20, 1 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert (config.arena_bytes, config.disk_bytes) == (64 << 20, 256 << 20)
    assert (own.arena_bytes, own.disk_bytes) == (256 << 20, 1 << 30)
    assert Config().disk_bytes is None


def test_a_share_must_hold_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    Config(host_budget="128MiB", window_bytes="32MiB")
    with pytest.raises(ValueError, match="host_budget is 100 MiB shared by 4 processes, less than"):
        Config(host_budget="100MiB", window_bytes="32MiB")
    Config(host_budget="100MiB", window_bytes="32MiB", budget_scope="rank")
    with pytest.raises(ValueError, match="budget_scope is 'machine'; choose one of 'node', 'rank'"):
        Config(budget_scope="machine")


def test_several_processes_need_fewer_threads_each(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Config().io_threads == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Config().io_threads == 1
    assert Config(io_threads=3).io_threads == 3
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "two")
    with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE is 'two', not a number of processes"):
        Config()


def test_a_mistyped_option_is_named_with_the_nearest_one() -> None:
    with pytest.raises(TypeError, match="no option 'windw_bytes'; did you mean 'window_bytes'"):
        offload.Session(windw_bytes="32MiB")
    with pytest.raises(TypeError, match="no option 'xyz'; there are allocator, "):
        offload.Session(xyz=1)
