"""Interval arithmetic against counting each nanosecond, and the bounded ring."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from offload.report.trace import Trace, intersection_ns, merged, total_ns

intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 15)).map(lambda p: (p[0], p[0] + p[1])),
    max_size=12,
)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {t for start, end in spans for t in range(start, end)}


@given(intervals)
def test_merged_covers_the_same_time(spans: list[tuple[int, int]]) -> None:
    out = merged(spans)
    assert points(out) == points(spans)
    assert total_ns(out) == len(points(spans))
    assert all(a[1] < b[0] for a, b in pairwise(out)), "disjoint, apart, sorted"
    assert all(start < end for start, end in out)


@given(intervals, intervals)
def test_intersection_is_the_time_of_both(
    a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    both = len(points(a) & points(b))
    assert intersection_ns(merged(a), merged(b)) == both
    assert intersection_ns(merged(b), merged(a)) == both


def test_the_ring_keeps_the_newest() -> None:
    trace = Trace(capacity=3)
    for i in range(5):
        trace.emit("write", i, 10 * i, start_ns=i + 1, end_ns=i + 2)
    assert [(e.name, e.block, e.nbytes, e.start_ns, e.end_ns) for e in trace.events()] == [
        ("write", i, 10 * i, i + 1, i + 2) for i in (2, 3, 4)
    ]


def test_a_moment_has_no_length() -> None:
    trace = Trace()
    trace.emit("kept", 1, 2)
    trace.emit("kept", 2, 2)
    first, second = trace.events()
    assert first.start_ns == first.end_ns <= second.start_ns
