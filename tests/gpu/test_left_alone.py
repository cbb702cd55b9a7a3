"""On a machine with an accelerator: a session for ``device="cpu"`` leaves its tensors alone."""

import copy

import pytest
import torch

import offload

pytestmark = pytest.mark.skipif(
    not torch.accelerator.is_available(), reason="this machine has no accelerator"
)


def test_tensors_on_the_accelerator_stay_there(tmp_path):
    device = torch.accelerator.current_accelerator()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.GELU()).to(device)
    offloaded = copy.deepcopy(plain)
    x = torch.randn(512, 256, device=device)

    plain(x).sum().backward()
    with (
        offload.Session(device="cpu", disk_dir=tmp_path, min_offload_bytes=0) as session,
        session.step() as step,
    ):
        offloaded(x).sum().backward()

    for a, b in zip(plain.parameters(), offloaded.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    assert step.report.offloaded_bytes == 0
    assert step.report.kept_bytes["kind"] > 0
