"""Fixtures of the tests of recomputation."""

import pytest
import torch

from offload.engines import native_is_built
from tests.recompute.programs import plain


@pytest.fixture(params=["plain", "native", "aio"])
def context(request, open_session):
    """What a program runs in: nothing, or a step of a session on each engine."""
    if request.param == "plain":
        return plain
    if request.param == "native" and not native_is_built():
        pytest.skip("the C++ extension was not built")
    return open_session(engine=request.param).step


@pytest.fixture
def fresh_compiler():
    """Nothing that other tests have compiled, and nothing left for them."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
