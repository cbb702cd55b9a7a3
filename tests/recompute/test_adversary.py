"""Programs made to break recomputation: no checkpoint, torch's and ours agree in every bit, and
torch's and ours in every operation, with and without a session.
"""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import offload
from offload.errors import OffloadWarning
from offload.recompute import Verifier
from tests.recompute.hostile import PROGRAMS
from tests.recompute.programs import assert_no_difference, direct
from tests.support import assert_identical, rand


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(open_session, name: str) -> None:
    assert_no_difference(PROGRAMS[name], open_session())


@pytest.mark.parametrize("name", PROGRAMS)
def test_verified_program(open_session, name: str) -> None:
    """No drift is seen where there is none, and nothing changes by looking."""
    session = open_session(verify_recompute=True)
    torch.manual_seed(0)
    expected = PROGRAMS[name](direct, contextlib.nullcontext)
    torch.manual_seed(0)
    assert_identical(expected, PROGRAMS[name](offload.checkpoint, session.step))
    report = session.recompute_report()
    assert report.recomputations > 0
    assert not report.drifted, str(report)


def everything(*_, **__):
    return CheckpointPolicy.MUST_CPU_OFFLOAD


@pytest.mark.parametrize("policy", [None, everything])
@pytest.mark.parametrize("name", PROGRAMS)
def test_selective_program(open_session, name: str, policy) -> None:
    """The products, or every result there is, come out of cells."""
    torch.manual_seed(0)
    expected = [*PROGRAMS[name](direct, contextlib.nullcontext), torch.get_rng_state()]
    run = partial(offload.checkpoint, context_fn=offload.selective(policy))
    torch.manual_seed(0)
    got = [*PROGRAMS[name](run, open_session().step), torch.get_rng_state()]
    assert_identical(expected, got)


def test_statistics_used_where_they_move() -> None:
    """What no checkpoint repeats is found: they have moved when the region runs again."""
    norm = nn.BatchNorm1d(4)

    def function(h):
        norm.train()
        h = norm(h)
        norm.eval()
        return norm(h).sin()

    with pytest.warns(OffloadWarning, match="first in BatchNorm1d"), Verifier() as verifier:
        offload.checkpoint(function, rand(6, 4).requires_grad_()).sum().backward()
    assert verifier.report().drifted


def test_a_backward_inside_of_a_region_inside_of_another(open_session) -> None:
    """It has the outer region recomputed, whose products are none of the inner one's."""
    before, after = nn.Linear(8, 8), nn.Linear(8, 8)

    def inner(x):
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(leaf.pow(3).sum(), leaf)
        return after(x + slope).sin()

    def program(run, selected):
        x = rand(4, 8).requires_grad_()
        loss = run(lambda x: x + selected(inner, torch.tanh(before(x))), x).square().mean()
        return list(torch.autograd.grad(loss, [x, before.weight, after.weight]))

    expected = program(direct, direct)
    selected = partial(offload.checkpoint, context_fn=offload.selective())
    assert_identical(expected, program(offload.checkpoint, selected))
    with open_session().step():
        assert_identical(expected, program(offload.checkpoint, selected))
