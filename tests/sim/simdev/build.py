"""Builds the C++ part of the device, once for each combination of sources, torch and compiler.

The result lies in ``build/sim/<hash>`` at the root of the repository. Two processes never build at
once; the second finds what the first has built.
"""

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).parent / "csrc"
CACHE = Path(__file__).parents[3] / "build" / "sim"
# A folder is one translation unit: torch's headers take most of the time, and are read once.
UNITS = ("runtime", "glue")
NAME = "_simdev"


class BuildError(RuntimeError):
    """The compiler failed; the message is what it printed."""


def build() -> Path:
    """Path of the extension module, built if it is not there yet.

    Raises:
        BuildError: the compiler was not found, or did not like the sources.
    """
    compiler = os.environ.get("CXX", "g++")
    flags = _compile_flags()
    folder = CACHE / _fingerprint(compiler, flags)
    library = folder / f"{NAME}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    with _only_one(), tempfile.TemporaryDirectory(dir=CACHE, prefix="building-") as name:
        if not library.exists():
            scratch = Path(name)
            objects = _compile(compiler, flags, scratch)
            linked = scratch / library.name
            _run_all([[compiler, "-shared", *map(str, objects), "-o", str(linked), *_link_flags()]])
            folder.mkdir(exist_ok=True)
            linked.replace(library)
    return library


def _compile_flags() -> list[str]:
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    return [
        "-std=c++20",
        "-O1",
        "-g0",
        "-fPIC",
        "-fvisibility=hidden",
        "-pthread",
        "-Wall",
        "-Wextra",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f"-I{SOURCES}",
        *(f"-isystem{path}" for path in includes),
    ]


def _link_flags() -> list[str]:
    folders = cpp_extension.library_paths()
    return [
        "-pthread",
        *(f"-L{folder}" for folder in folders),
        *(f"-Wl,-rpath,{folder}" for folder in folders),
        "-ltorch_python",
        "-ltorch_cpu",
        "-lc10",
    ]


def _fingerprint(compiler: str, flags: list[str]) -> str:
    (version,) = _run_all([[compiler, "--version"]])
    digest = hashlib.sha256()
    for text in (torch.__version__, sys.version, version, *flags, *_link_flags()):
        digest.update(text.encode() + b"\0")
    for path in sorted(SOURCES.rglob("*.[ch]*")):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, flags: list[str], scratch: Path) -> list[Path]:
    objects, commands = [], []
    for unit in UNITS:
        source = scratch / f"{unit}.cc"
        names = sorted(path.name for path in (SOURCES / unit).glob("*.cc"))
        source.write_text("".join(f'#include "{unit}/{name}"\n' for name in names))
        objects.append(source.with_suffix(".o"))
        commands.append([compiler, *flags, "-c", str(source), "-o", str(objects[-1])])
    _run_all(commands)
    return objects


def _run_all(commands: list[list[str]]) -> list[str]:
    """Run all at the same time and return what they printed."""
    try:
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for command in commands
        ]
    except OSError as error:
        raise BuildError(f"{commands[0][0]} cannot be run: {error}") from error
    outputs = [process.communicate()[0] for process in running]
    for command, process, output in zip(commands, running, outputs, strict=True):
        if process.returncode != 0:
            raise BuildError(f"this failed:\n{' '.join(command)}\n{output}")
    return outputs


@contextmanager
def _only_one() -> Iterator[None]:
    """Hold the lock on the cache; the kernel lets it go if the process dies."""
    with (CACHE / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
