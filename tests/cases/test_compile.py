"""Compiled models inside a step."""

import pytest
import torch

from offload import Session
from tests.support import assert_same, grads, net

# torch's own compiler warns of its own deprecations
pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")


def test_compiled_model(session: Session) -> None:
    """What a compiled region saves goes through the session, twice in a row."""

    def step(context):
        torch._dynamo.reset()
        model = net()
        x = torch.ones(4, 16, requires_grad=True)
        compiled = torch.compile(model, backend="aot_eager")
        with context():
            for _ in range(2):
                compiled(x).pow(2).sum().backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)
    assert session.report().offloaded_blocks > 0


def test_step_inside_a_compiled_function(session: Session) -> None:
    """Entering a step is a graph break, not an error."""

    def step(context):
        torch._dynamo.reset()
        model = net()
        x = torch.ones(4, 16, requires_grad=True)

        @torch.compile(backend="eager")
        def train(x):
            with context():
                return model(x).pow(2).sum()

        train(x).backward()
        return [x.grad, *grads(model)]

    assert_same(step, session)
