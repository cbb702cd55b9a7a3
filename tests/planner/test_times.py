"""What the times of a plan are made of."""

from torch import nn

from offload.trace import merged, total_ns
from tests.conftest import Opener
from tests.support import rand


def test_a_copy_that_the_thread_makes_is_no_wait(open_session: Opener) -> None:
    session = open_session(device="cpu", min_offload_bytes=0, keep_last_bytes=0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    with session.step() as step:
        model(rand(64, 64)).sum().backward()
    counters = session._tiers.common.counters
    copies = counters.lanes["offload"].intervals
    assert copies and set(copies) <= set(counters.waits)  # of the report
    waited_ns = total_ns(merged(counters.only_waits))
    assert waited_ns <= counters.stall_ns + counters.backpressure_ns
    assert step.report.offloaded_blocks == len(copies)
