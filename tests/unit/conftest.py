"""Fixtures of the tests of the native engine's types."""

import gc

import pytest

from offload.units import MIB


@pytest.fixture
def arena():
    native = pytest.importorskip("offload._native", reason="the extension is not built")
    arena = native.Arena(16 * MIB)
    yield arena
    gc.collect()
    assert arena.close() == 0


@pytest.fixture
def file(tmp_path):
    native = pytest.importorskip("offload._native", reason="the extension is not built")
    return native.File(str(tmp_path))


@pytest.fixture
def queue(file):
    native = pytest.importorskip("offload._native", reason="the extension is not built")
    queue = native.Queue(file)
    yield queue
    queue.close()
