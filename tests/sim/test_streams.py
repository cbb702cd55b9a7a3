"""Programs of several streams: memory belongs to the stream it was made on, and a copy out may be
queued while another stream is current.
"""

from pathlib import Path

import pytest
import simdev
import torch
from offloading import session_on_sim
from torch import Tensor

import offload
from tests.support import chain

NBYTES = 16 << 10
TIMES = 6


@pytest.fixture(autouse=True)
def _slow_copies() -> None:
    """A copy takes far longer than what is computed meanwhile, and in real time where asked."""
    simdev.configure(sleep_scale=1.0, copy_latency_ns=20_000_000)


def full(value: float) -> Tensor:
    return torch.full((NBYTES // 4,), value, device="sim")


@pytest.mark.parametrize("by_an_operation", [False, True])
def test_source_that_belongs_to_another_stream(by_an_operation: bool, tmp_path: Path) -> None:
    """Made on the main stream, saved on a side stream that alone has packed anything: its memory
    returns to the main stream, which must not use it before it has been copied.
    """
    simdev.configure(
        scheduler=simdev.Scheduler.THREADS, sleep_scale=1.0, copy_latency_ns=20_000_000
    )
    scale = torch.full((1024,), 2.0, device="sim").requires_grad_()
    zero = torch.zeros(1024, device="sim").requires_grad_()
    main, stream = torch.accelerator.current_stream(), torch.Stream(device="sim")
    with session_on_sim(str(tmp_path), window_bytes=4096, host_budget=64 << 10) as session:
        with session.step():
            x, small = torch.ones(1024, device="sim"), torch.ones(1, device="sim")
            if by_an_operation:
                x = x + zero  # saves nothing
            stream.wait_stream(main)
            with stream:
                y = x * scale
            main.wait_stream(stream)
            del x
            with stream:
                z = small * scale  # saved through the window of one: the copy of x is settled
            torch.full((1024,), 7.0, device="sim")  # on the memory of x
            main.wait_stream(stream)
            loss = (y + z).sum()
            loss.backward()
        del y, z
        assert simdev.races() == []
        assert torch.equal(scale.grad, torch.full((1024,), 2.0, device="sim"))


@pytest.mark.parametrize("placement", [offload.Placement.HOST, offload.Placement.DISK])
def test_batches_made_on_a_stream_that_saves_nothing(
    scheduler, placement: offload.Placement, tmp_path: Path
) -> None:
    """A loader's stream, joined once a step: without a session the graph keeps a batch until
    backward, with one it goes earlier, and its memory is the loader's.
    """
    main, loader = torch.accelerator.current_stream(), torch.Stream(device="sim")
    w = full(1.0).requires_grad_()
    options = {"window_bytes": NBYTES, "policy": lambda tensor: placement}
    with session_on_sim(str(tmp_path), **options) as session:
        for _ in range(2):
            w.grad = None
            with session.step():
                loss = torch.zeros((), device="sim")
                for i in range(TIMES):
                    with loader:
                        x = full(i + 1.0)
                    main.wait_stream(loader)
                    loss = loss + (x * w).sum()
                    del x
                loss.backward()
            loader.wait_stream(main)
            del loss
    assert simdev.races() == []
    assert set(w.grad.tolist()) == {21.0}


def test_sent_out_while_another_stream_is_current(scheduler, tmp_path: Path) -> None:
    """The tail keeps a tensor that a side stream computes; the main one, which has not waited for
    it, pushes it out.
    """
    main, side = torch.accelerator.current_stream(), torch.Stream(device="sim")
    x, other = full(0.5).requires_grad_(), full(0.25).requires_grad_()
    with session_on_sim(str(tmp_path), keep_last_bytes=2 * NBYTES) as session, session.step():
        side.wait_stream(main)
        with side:
            one = chain(x, 2)  # fills the tail, and nothing leaves yet
        two = chain(other, 6)
        main.wait_stream(side)
        (one + two).backward()
    main.wait_stream(side)
    assert simdev.races() == []
    for leaf, length in ((x, 2), (other, 6)):
        again = leaf.detach().requires_grad_()
        chain(again, length).backward()
        assert torch.equal(leaf.grad, again.grad)


def test_memory_of_a_stream_whose_own_tensors_stay(scheduler, tmp_path: Path) -> None:
    """What a side stream saves stays on the device, what it made leaves from the main stream."""
    main, side = torch.accelerator.current_stream(), torch.Stream(device="sim")
    stays = NBYTES // 2

    def policy(tensor: offload.SavedTensor) -> offload.Placement:
        return offload.Placement.KEEP if tensor.nbytes == stays else offload.Placement.HOST

    small = torch.full((stays // 4,), 0.5, device="sim").requires_grad_()
    with session_on_sim(str(tmp_path), window_bytes=NBYTES, policy=policy) as session:
        for _ in range(2):
            small.grad = None
            with session.step():
                loss = torch.zeros((), device="sim")
                for _ in range(TIMES):
                    side.wait_stream(main)
                    with side:
                        made = torch.cat([small.sin(), small])  # saves small, and no result
                    main.wait_stream(side)
                    loss = loss + (made * made).sum()
                    del made
                loss.backward()
            side.wait_stream(main)
            del loss
    assert simdev.races() == []
