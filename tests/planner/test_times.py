"""What the times of a plan are made of."""

import pytest
from torch import nn

from offload.planner.profile import Budgets, ModelProfile
from offload.planner.segment_profile import SegmentProfile
from offload.report.trace import merged, total_ns
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


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_segment_takes_what_it_takes_where_it_is_kept(kept: int) -> None:
    """Once that is known: the first time meets memory that was never touched."""
    profile = ModelProfile("disk", min_offload_bytes=1)
    for number in (1, 2):  # alike
        segment = SegmentProfile(str(number), saved={number: 1 << 20})
        segment.measured("disk", 3.0, 4.0, 0.0)
        profile.segments.append(segment)
    for seconds in [(50.0, 60.0, 0.0), (2.0, 6.0, 0.0)][:kept]:
        profile.segments[0].measured("keep", *seconds)
    for segment in profile.chain(Budgets(1 << 30)).segments[:2]:
        by_action = {o.action: o for o in segment.options}
        own = segment.forward_seconds, segment.backward_seconds
        extra = by_action["disk"].forward_seconds, by_action["disk"].backward_seconds
        assert own == ((2.0, 6.0) if kept == 2 else (3.0, 4.0))
        assert extra == ((1.0, 0.0) if kept == 2 else (0.0, 0.0))
        assert (by_action["keep"].forward_seconds, by_action["keep"].backward_seconds) == (0, 0)
