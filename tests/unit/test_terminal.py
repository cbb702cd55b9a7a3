"""Commands and the terminal: outputs that take no more, warnings, interrupts, and odd targets."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

import offload
from offload.__main__ import main
from offload.system.files import write_whole
from offload.system.machine import filesystem_of

pytestmark = pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device of Linux")

SCRIPT = """
import os, subprocess, sys, time, warnings
import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)))
x = torch.ones(64, 64)

def step(): model(x).sum().backward()

def plain(): return model, step

def talks():
    print("made")
    def talking():
        print("python")
        os.write(1, b"descriptor\\n")
        subprocess.run(["echo", "child"])
        step()
    return model, talking

def warns():
    warnings.warn("of the script\\nin two lines")
    def warning():
        warnings.warn("of a step", RuntimeWarning)
        step()
    return model, warning

def moves():
    os.chdir("/")
    def moving():
        os.chdir("/tmp")
        step()
    return model, moving

def forks():
    def forking():
        step()
        if os.fork() == 0:
            return
        os.wait()
    return model, forking

def forks_and_leaves():
    def forking():
        step()
        if os.fork() == 0:
            sys.exit(7)
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 7
    return model, forking

def closes():
    def closing():
        sys.stdout.close()
        step()
    return model, closing

def leaves():
    def leaving():
        step()
        sys.exit("enough")
    return model, leaving

class Odd(Exception):
    def __str__(self): raise RuntimeError

def raises_odd():
    def raising(): raise Odd
    return model, raising

def lines():
    def raising(): raise ValueError("one\\n  two")
    return model, raising

def slow():
    open("began", "w").close()
    time.sleep(60)

def swallows():
    def swallowing():
        open("began", "w").close()
        try:
            time.sleep(60)
        except KeyboardInterrupt:  # as the callback of a weak reference does
            step()
    return model, swallowing
"""
MOVES = ["-o", "min_offload_bytes=0", "-o", "keep_last_bytes=0", "--device", "cpu"]
FEW = {
    "profile": ["--steps", "1", "--warmup", "0", *MOVES],
    "tune": ["--trials", "1", "--repeats", "1", "--max-overhead", "9", *MOVES],
    "plan": ["--device-budget", "200KiB", *MOVES],
    "sweep": ["--points", "1", "--steps", "1", *MOVES],
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the rates of the machine are remembered: it is measured once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv("OFFLOAD_DIR", str(tmp_path))
    return tmp_path


class Forked:
    """The command in a process of its own, with the descriptors of a shell's making."""

    def __init__(self, arguments: list[str], redirect: Callable[[], None] = lambda: None) -> None:
        out, err = os.pipe(), os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.dup2(out[1], 1)
            os.dup2(err[1], 2)
            os._exit(self._run(arguments, redirect))
        os.close(out[1])
        os.close(err[1])
        self._ends = out[0], err[0]

    def _run(self, arguments: list[str], redirect: Callable[[], None]) -> int:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            redirect()
            for name, descriptor in (("stdout", 1), ("stderr", 2)):
                stream = None
                with contextlib.suppress(OSError):
                    os.fstat(descriptor)
                    stream = open(descriptor, "w", buffering=1, closefd=False)  # noqa: SIM115
                setattr(sys, name, stream)
            main(arguments, prog_name="offload")
        except SystemExit as left:
            return left.code if isinstance(left.code, int) else int(left.code is not None)
        except BaseException:
            os.write(2, traceback.format_exc().encode())
        return 99

    def ended(self) -> tuple[int, str, str]:
        """Exit status, standard output and standard error."""
        told = []
        for end in self._ends:
            with os.fdopen(end) as f:
                told.append(f.read())
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status), told[0], told[1]


def to(path: str, *descriptors: int) -> Callable[[], None]:
    def redirect() -> None:
        opened = os.open(path, os.O_WRONLY)
        for descriptor in descriptors:
            os.dup2(opened, descriptor)

    return redirect


def closed(*descriptors: int) -> Callable[[], None]:
    return lambda: [os.close(d) for d in descriptors] and None


def unread() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, 1)
    os.close(reader)
    os.close(writer)


LOST = "Error: standard output cannot be written: "
PRINTS = [["--help"], ["tune", "--help"], ["--version"], ["profile", "mine.py:plain"]]
PRINTS += [["profile", "mine.py:plain", "--json"], ["plan", "mine.py:plain"]]


def filled(arguments: list[str]) -> list[str]:
    return [*arguments, *([] if len(arguments) < 2 or "--help" in arguments else FEW[arguments[0]])]


@pytest.mark.parametrize("arguments", PRINTS, ids=" ".join)
@pytest.mark.parametrize(
    ("redirect", "status", "told"),
    [
        (
            to("/dev/full", 1),
            3,
            "Error: standard output cannot be written: No space left on device",
        ),
        (closed(1), 3, "Error: standard output cannot be written: Bad file descriptor"),
        (unread, 141, ""),
    ],
    ids=["full", "closed", "unread"],
)
def test_standard_output_takes_no_more(
    arguments: list[str], redirect: Callable[[], None], status: int, told: str
) -> None:
    code, _, err = Forked(filled(arguments), redirect).ended()
    assert (code, err.strip()) == (status, told)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("redirect", [to("/dev/full", 2), closed(2), closed(0, 2)])
def test_standard_error_takes_no_more(redirect: Callable[[], None]) -> None:
    code, out, _ = Forked(["profile", "mine.py:warns", "--json", *FEW["profile"]], redirect).ended()
    assert code == 0 and json.loads(out)["format"] == 1
    assert Forked(["profile", "nothing"], redirect).ended()[0] == 2
    assert Forked(["profile", "mine.py:leaves"], redirect).ended()[0] == 3


def test_the_end_of_python_is_silent_too() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "offload", "--version"],
            stdout=full, stderr=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": str(Path(offload.__file__).parents[1])},
        )  # fmt: skip
    assert done.returncode == 3
    assert done.stderr == f"{LOST}No space left on device\n"


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "option"), [("plan", "--save"), ("sweep", "--png"), ("sweep", "--html")]
)
def test_a_full_disk_is_told(command: str, option: str) -> None:
    if command == "sweep":
        pytest.importorskip("matplotlib")
    done = CliRunner().invoke(
        main, [command, "mine.py:plain", *FEW[command], option, "/dev/full", "--quiet"]
    )
    assert done.exit_code == 3
    assert done.stderr == "Error: /dev/full cannot be written: No space left on device\n"
    assert done.stdout == ""


def test_files_are_written_whole_or_not_at_all(here: Path) -> None:
    file, link = here / "file", here / "link"
    file.write_text("before")
    file.chmod(0o640)
    link.symlink_to(file)
    write_whole(link, "after \udcff")
    assert file.read_text() == "after �" and link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o640
    with pytest.raises(IsADirectoryError, match=str(here)):
        write_whole(here, "x")
    full = here / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_whole(full, "x")
    assert Path("/dev/full").is_char_device()
    assert sorted(os.listdir(here)) == ["file", "full", "link", "mine.py"]


@pytest.mark.filterwarnings("default")
def test_a_disk_that_fills_up_leaves_what_was_there(here: Path) -> None:
    (here / "file").write_text("before")

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    code, _, err = Forked(
        ["plan", "mine.py:plain", "--engine", "aio", *FEW["plan"], "--save", "file"], limited
    ).ended()
    assert code == 3 and err.endswith("Error: file cannot be written: File too large\n"), err
    assert (here / "file").read_text() == "before"
    assert sorted(p for p in os.listdir(here) if p != "__pycache__") == ["file", "mine.py"]


# -- what targets do ------------------------------------------------------------------------------


@pytest.mark.parametrize("command", FEW)
def test_what_a_target_prints_is_on_standard_error(command: str) -> None:
    code, out, err = Forked([command, "mine.py:talks", "--json", *FEW[command]]).ended()
    assert code in (0, 1), err
    assert json.loads(out)["format"] == 1
    for told in ("made", "python", "descriptor", "child"):
        assert told in err.splitlines()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("command", FEW)
def test_warnings_are_told_in_a_line_once(command: str, here: Path) -> None:
    done = CliRunner().invoke(main, [command, "mine.py:warns", *FEW[command]])
    assert done.exit_code in (0, 1), done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("Warning: ")]
    assert lines == [
        f"Warning: UserWarning: of the script in two lines ({here}/mine.py:23)",
        f"Warning: RuntimeWarning: of a step ({here}/mine.py:25)",
    ]


@pytest.mark.filterwarnings("default")
def test_our_own_warnings_are_blamed_on_nobody() -> None:
    if not filesystem_of("/dev/shm").in_memory:
        pytest.skip("no tmpfs here")
    given = [*FEW["profile"], "--disk-dir", "/dev/shm", "--quiet"]
    done = CliRunner().invoke(main, ["profile", "mine.py:plain", *given])
    (told,) = done.stderr.splitlines()
    assert told.startswith("Warning: ") and "frees nothing" in told and ".py" not in told


@pytest.mark.parametrize("function", ["moves", "forks", "forks_and_leaves"])
def test_targets_that_are_let_do_so(function: str, here: Path) -> None:
    (here / "scratch").mkdir()
    out = ["--out", "out", "--json", "--disk-dir", "scratch"]
    code, told, err = Forked(["profile", f"mine.py:{function}", *FEW["profile"], *out]).ended()
    assert (code, err) == (0, "")
    assert json.loads(told)["format"] == 1  # one document, not one of each child
    assert (here / "out" / "profile.html").exists()


@pytest.mark.parametrize("command", FEW)
@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("leaves", "failed: SystemExit: enough ("),
        ("lines", "failed: ValueError: one two ("),
        ("raises_odd", "failed: Odd: its message cannot be shown ("),
    ],
)
def test_targets_that_fail(command: str, function: str, why: str) -> None:
    done = CliRunner().invoke(main, [command, f"mine.py:{function}", *FEW[command]])
    assert done.exit_code == 3, done.output
    assert len(done.stderr.splitlines()) == 1
    assert f"Error: a step of 'mine.py:{function}' {why}" in done.stderr
    assert "mine.py:" in done.stderr.rpartition("(")[2]


def test_a_target_may_close_its_output() -> None:
    code, _, err = Forked(["profile", "mine.py:closes", *FEW["profile"]]).ended()
    assert (code, err) == (0, "")


def test_a_script_with_a_syntax_error(here: Path) -> None:
    (here / "mine.py").write_text("def f(:\n")
    done = CliRunner().invoke(main, ["profile", "mine.py:f"])
    assert done.exit_code == 3
    assert "could not be loaded: SyntaxError: " in done.stderr and "line 1" in done.stderr


# -- interrupts -----------------------------------------------------------------------------------


def interrupted(arguments: list[str], began: Callable[[int], bool]) -> tuple[int, str, str]:
    """What a command says that is interrupted once ``began`` is true of its process."""
    command = Forked(arguments)
    until = time.monotonic() + 60
    while not began(command.pid):
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(command.pid, signal.SIGINT)
    return command.ended()


@pytest.mark.parametrize("command", FEW)
@pytest.mark.parametrize("function", ["slow", "swallows"])
def test_an_interrupt(command: str, function: str, here: Path) -> None:
    arguments = [command, f"mine.py:{function}", *FEW[command]]
    code, out, err = interrupted(arguments, lambda pid: (here / "began").exists())
    assert (code, out, err) == (130, "", "Interrupted.\n")
    assert sorted(p for p in os.listdir(here) if p != "__pycache__") == ["began", "mine.py"]


def test_an_interrupted_demo_ends_its_worker() -> None:
    workers: list[str] = []

    def trains(pid: int) -> bool:
        with contextlib.suppress(OSError):
            workers[:] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            told = [Path(f"/proc/{w}/cmdline").read_text() for w in workers]
            return any("offload.cli.demo" in arguments for arguments in told)
        return False

    code, _, err = interrupted(["demo", "--workload", "gpt-tiny", "--steps", "1000"], trains)
    assert (code, err) == (130, "Interrupted.\n")
    left = [w for w in workers if os.path.exists(f"/proc/{w}")]
    assert not left, [Path(f"/proc/{w}/stat").read_text() for w in left]


def test_an_interrupted_probe_leaves_nothing(here: Path) -> None:
    def measures(pid: int) -> bool:
        with contextlib.suppress(OSError):  # it opens and closes meanwhile
            found = Path(f"/proc/{pid}/fd").iterdir()
            return any(os.readlink(descriptor).startswith(f"{here}/") for descriptor in found)
        return False

    code, _, err = interrupted(["probe", ".", "--seconds", "9"], measures)
    assert (code, err) == (130, "Interrupted.\n")
    assert os.listdir(here) == ["mine.py"]
