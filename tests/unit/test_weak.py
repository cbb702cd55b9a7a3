"""References that hold no memory."""

import _thread
import functools
import signal
from collections import deque
from collections.abc import Iterator

import pytest
import torch

from offload.engines import native_is_built
from offload.tensors.weak import StorageRef


@pytest.fixture
def listening() -> Iterator[None]:
    """To Ctrl-C, which what runs in the background of a shell ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("listening")
@pytest.mark.skipif(not native_is_built(), reason="needs the extension")
def test_its_death_drops_no_interrupt() -> None:
    """Ctrl-C comes, and before any line of Python runs the reference dies: as at the end of a long
    call of torch's.
    """
    refs = [StorageRef(torch.ones(4).untyped_storage())]
    calls = [_thread.interrupt_main, refs.clear]  # both are C
    with pytest.raises(KeyboardInterrupt):
        deque(map(functools.partial.__call__, map(functools.partial, calls)), maxlen=0)
        raise AssertionError("dropped")
    assert not refs
