"""A report in other forms: waits by cause, advice, comparison, scalars, Prometheus, callbacks."""

import json
import re
import sys
import threading
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.errors import OffloadWarning
from offload.report import Counters, StepReport, Wait
from offload.report.trace import Subject
from offload.tensors.layout import TensorLayout
from tests.conftest import Opener
from tests.support import in_threads

NOTHING = StepReport.of([])
LAYOUT = TensorLayout.of(torch.ones(2, 3))


def report(**values: object) -> StepReport:
    return replace(NOTHING, **{"steps": 1, "seconds": 1.0, "period_seconds": 1.0, **values})


# -- waits -----------------------------------------------------------------------------------------

waits = st.lists(
    st.builds(
        lambda kind, module, ns: (kind, Subject(7, module, "MulBackward0", LAYOUT), ns),
        st.sampled_from(["stall", "backpressure"]),
        st.sampled_from(["", "a", "b", "b.c"]),
        st.integers(1, 10**9),
    ),
    max_size=20,
)


def counted(events: list[tuple[str, Subject, int]]) -> Counters:
    c = Counters(started_ns=0, ended_ns=1)
    for kind, about, ns in events:
        c.wait(kind, 0, ns, about)
    return c


@given(waits, waits)
def test_waits_add_up_whoever_adds(a: list, b: list) -> None:
    found = StepReport.of([counted(a), counted(b)])
    stalls = sum(ns for kind, _, ns in a + b if kind == "stall")
    assert found.stall_seconds == pytest.approx(stalls / 1e9)
    assert sum(w.count for w in found.waits) == len(a + b)
    assert sum(found.waits_by_module.values()) == pytest.approx(
        found.stall_seconds + found.backpressure_seconds
    )
    assert sum(found.waits_by_tensor.values()) == pytest.approx(sum(w.seconds for w in found.waits))
    seconds = [w.seconds for w in found.waits]
    assert seconds == sorted(seconds, reverse=True)
    again = StepReport.summed([StepReport.of([counted(a)]), StepReport.of([counted(b)])])
    assert again.waits == found.waits


def test_more_different_waits_than_are_named_keep_their_sum() -> None:
    c = Counters(started_ns=0, ended_ns=1)
    for i in range(3000):
        c.wait("stall", 0, 1000 + i, Subject(i, f"layer.{i}"))
    found = StepReport.of([c])
    assert len(found.waits) <= 258
    assert sum(w.count for w in found.waits) == 3000
    assert sum(w.seconds for w in found.waits) == pytest.approx(found.stall_seconds)
    doubled = StepReport.summed([found, found])
    assert sum(w.count for w in doubled.waits) == 6000
    for i in range(3000):
        c.wait("stall", 0, 1000 + i, Subject(i, f"other.{i}"))
    both = StepReport.summed([doubled, StepReport.of([c])])
    assert sum(w.count for w in both.waits) == 6000 + 6000
    assert [w.module for w in both.waits].count("(others)") == 1


class _Talkative(str):
    """The name of a tensor: while a report is made of it, the computation goes on to wait."""

    counters: Counters

    def __str__(self) -> str:
        self.counters.wait("stall", 0, 5, Subject(module=f"m{len(self.counters.waited_for)}"))
        return "float32[2, 3]"


def test_a_report_of_a_step_that_goes_on() -> None:
    c = Counters(started_ns=0, ended_ns=1)
    name = _Talkative()
    name.counters = c
    c.wait("stall", 0, 7, Subject(tensor=name))  # type: ignore[arg-type]
    assert [w.count for w in StepReport.of([c]).waits] == [1]
    assert len(c.waited_for) > 1


def test_a_wait_names_its_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    (wait,) = StepReport.of(
        [counted([("stall", Subject(7, "a", "MulBackward0", LAYOUT), 5)])]
    ).waits
    assert wait == Wait("stall", "a", "MulBackward0", "float32[2, 3]", 1, 5e-9)
    text = str(report(stall_seconds=0.5, waits=(wait,)))
    assert all(word in text for word in ("a", "Mul", "float32[2, 3]"))
    assert max(map(len, text.splitlines())) <= 100


# -- the drive, and advice -------------------------------------------------------------------------


def test_a_day_of_steps_and_the_life_of_a_drive() -> None:
    r = report(written_bytes=3 * 10**9, steps=2, seconds=1.5, period_seconds=2.0)
    assert r.written_bytes_per_day == 1.5e9 * 86_400
    assert r.drive_days() == pytest.approx(600e12 / (1.5e9 * 86_400))
    assert r.drive_days("1200TB") == pytest.approx(2 * r.drive_days())
    assert "129.6 TB a day" in str(r)
    assert report().drive_days() is None
    with pytest.raises(ValueError, match="endurance"):
        r.drive_days("much")


@pytest.mark.parametrize(
    ("values", "what", "hint"),
    [
        ({"kept_bytes": {"small": 5000}}, "nothing was offloaded", "lower min_offload_bytes"),
        ({"saved_bytes": 5000}, "nothing was offloaded", "lower keep_last_bytes"),
        ({}, "nothing was offloaded", "run its forward inside the step"),
        ({"kept_bytes": {"budget": 9}}, "stayed in memory for budget", "raise disk_budget"),
        ({"kept_bytes": {"error": 9}}, "stayed in memory for error", "the disk failed"),
        ({"stall_seconds": 0.5}, "50% of the time went to waiting", "raise prefetch_bytes"),
        ({"backpressure_seconds": 0.5}, "forward waited for room", "raise window_bytes"),
        ({"stall_seconds": 0.5, "overlap": 0.1}, "only 10% of the transfer", "waited for"),
        ({"cancelled_bytes": 9, "written_bytes": 9}, "no longer wanted", "raise keep_last_bytes"),
        ({"written_bytes": 10**11}, "as much as a consumer drive", "recomputation"),
    ],
)
def test_advice(values: dict, what: str, hint: str) -> None:
    found = report(**values).advice()
    assert [a for a in found if what in a.what and hint in a.hint], found


def test_no_advice_where_all_is_well() -> None:
    good = {"offloaded_bytes": 10**9, "overlap": 0.99, "hits": 100, "stall_seconds": 0.001}
    assert report(**good).advice() == []
    assert NOTHING.advice() == []


# -- beside another --------------------------------------------------------------------------------


def test_comparison_is_per_step() -> None:
    a = report(steps=2, seconds=4.0, written_bytes=8 << 20, overlap=0.5)
    b = report(steps=1, seconds=1.0, written_bytes=4 << 20)
    found = a - b
    assert (found["seconds"].change, found["seconds"].ratio) == (1.0, 2.0)
    assert found["written_bytes"] not in found.changed()
    assert found["overlap"].other == 0.0 and found["overlap"].ratio is None
    with pytest.raises(KeyError):
        found["nonsense"]
    with pytest.raises(TypeError):
        a - 1
    parsed = json.loads(found.to_json())
    assert parsed["format"] == 1
    assert {"name": "seconds", "value": 2.0, "other": 1.0, "change": 1.0, "ratio": 2.0} in parsed[
        "differences"
    ]
    text = str(found)
    assert "+1.00 s" in text and "written_bytes " not in text
    assert (a - a).changed() == ()
    assert "no figure differs" in str(a - a)
    assert "no figure differs" not in str(found)


# -- monitoring ------------------------------------------------------------------------------------

LINE = re.compile(r'[a-z_]+(\{([a-z]+="([^"\\\n]|\\.)*",?)*\})? -?[0-9.]+(e[+-]?[0-9]+)?')


def test_prometheus_reads_every_line(session: offload.Session) -> None:
    x = torch.ones(64, 64, requires_grad=True)
    with session.step():
        x.sin().sin().sum().backward()
    found = session.report()
    lines = found.prometheus({"job": 'a"b\\c\nd'}).splitlines()
    declared: set[str] = set()
    for line in lines:
        if line.startswith("# "):
            _, what, name, text = line.split(" ", 3)
            assert text and name.startswith("offload_")
            if what == "TYPE":
                assert name not in declared and text in ("counter", "gauge")
                declared.add(name)
        else:
            assert LINE.fullmatch(line), line
            assert re.split(r"[{ ]", line)[0] in declared
            assert r'job="a\"b\\c\nd"' in line
    assert len(lines) > 60
    plain = found.prometheus()
    assert f"offload_written_bytes_total {found.written_bytes}" in plain
    assert f'offload_lane_bytes_total{{lane="spill"}} {found.written_bytes}' in plain


def test_scalars_are_flat_numbers_per_step(session: offload.Session) -> None:
    x = torch.ones(64, 64, requires_grad=True)
    for _ in range(2):
        with session.step():
            x.sin().sin().sum().backward()
    found = session.report()
    scalars = found.scalars("train/")
    assert all(name.startswith("train/") and type(v) is float for name, v in scalars.items())
    assert scalars["train/offloaded_bytes"] == found.offloaded_bytes / 2
    assert scalars["train/peak_disk_bytes"] == found.peak_disk_bytes


def test_callbacks_get_every_step_once(open_session: Opener, any_engine: str) -> None:
    session = open_session(engine=any_engine)
    reports: list[StepReport] = []
    session.log_every(3, reports.append)
    x = torch.ones(64, 64, requires_grad=True)
    for _ in range(7):
        with session.step():
            loss = x.sin().sum()
        loss.backward()  # after the block: still the step's
    assert [r.steps for r in reports] == [3, 3]
    del loss
    session.close()
    session.close()
    assert [r.steps for r in reports] == [3, 3, 1]
    total = session.report()
    assert (
        sum(r.hits + r.lates + r.misses for r in reports) == total.hits + total.lates + total.misses
    )
    assert StepReport.summed(reports).offloaded_bytes == total.offloaded_bytes


def test_a_callback_that_fails_is_dropped_and_training_goes_on(
    open_session: Opener, any_engine: str
) -> None:
    session = open_session(engine=any_engine)
    calls: list[int] = []

    def fail(report: StepReport) -> None:
        calls.append(report.steps)
        raise RuntimeError("no network")

    session.log_every(1, fail)
    with session.step():
        pass
    with pytest.warns(OffloadWarning, match="RuntimeError: no network"), session.step():
        pass
    with session.step():
        pass
    assert calls == [1]


def test_a_callback_may_run_steps_of_its_own(open_session: Opener, any_engine: str) -> None:
    """To evaluate a model, for instance. They are steps like any other."""
    session = open_session(engine=any_engine)
    x = torch.ones(64, 64, requires_grad=True)
    seen: list[StepReport] = []

    def evaluate(report: StepReport) -> None:
        seen.append(report)
        with session.step() as step:
            x.sin().sum().backward()
        assert step.report.offloaded_blocks == 1

    session.log_every(1, evaluate)
    for _ in range(3):
        with session.step() as step:
            x.sin().exp().sum().backward()
        assert step.report.offloaded_blocks == 2
    assert [r.steps for r in seen] == [1, 2]  # with the step of the callback before
    assert session.report().steps == 5
    with pytest.warns(OffloadWarning, match="the session is closed"):
        session.close()


def test_a_report_while_another_thread_trains(open_session: Opener, any_engine: str) -> None:
    """No step is missing from it, and none is in it twice."""
    session = open_session(engine=any_engine)
    over = threading.Event()

    def train() -> None:
        try:
            for _ in range(400):
                with session.step():
                    torch.ones(8, 8, requires_grad=True).sin().sum().backward()
        finally:
            over.set()

    def look() -> None:
        before = NOTHING
        while not over.is_set():
            found = session.report()
            assert found.steps >= before.steps
            assert found.saved_bytes >= before.saved_bytes
            assert found.saved_bytes <= 256 * found.steps
            before = found

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        in_threads(train, look)
    finally:
        sys.setswitchinterval(interval)
    assert session.report().steps == 400


def test_an_interrupt_in_a_callback_leaves_no_step_open(
    open_session: Opener, any_engine: str
) -> None:
    session = open_session(engine=any_engine)

    def interrupt(report: StepReport) -> None:
        raise KeyboardInterrupt

    session.log_every(1, interrupt)
    with session.step():
        pass
    with pytest.raises(KeyboardInterrupt), session.step():
        pass
    session._reporter._logs.clear()
    session.close()


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_callbacks_are_checked_where_they_are_given(
    open_session: Opener, any_engine: str, steps: object
) -> None:
    session = open_session(engine=any_engine)
    with pytest.raises(ValueError, match="at least 1"):
        session.log_every(steps, print)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callback"):
        session.log_every(1, "print")  # type: ignore[arg-type]
