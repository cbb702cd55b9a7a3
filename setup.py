"""Builds the native engine. Everything else about the package stands in setup.cfg."""

from glob import glob

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension
from setuptools import setup

native = Pybind11Extension(
    "offload._native",
    sources=sorted(glob("csrc/*.cc")),
    depends=sorted(glob("csrc/*.h")),
    cxx_std=17,
    extra_compile_args=["-O3", "-Wall", "-Wextra", "-pthread"],
    extra_link_args=["-pthread"],
    # Without a compiler the package still installs and uses its Python engine.
    optional=True,
)

with ParallelCompile(default=2):
    setup(ext_modules=[native])
