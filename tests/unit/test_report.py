"""Figures: what is counted of a step, how steps add up, and how it is written."""

import json
from dataclasses import fields

import pytest
import torch

import offload
from offload.report import Counters, StepReport
from tests.support import chain, drain, rand


def counters(**values: object) -> Counters:
    c = Counters(started_ns=0, ended_ns=2_000_000_000)
    for name, value in values.items():
        setattr(c, name, value)
    return c


def test_one_step() -> None:
    c = counters(offloaded_bytes=10, hits=3, stall_ns=500_000_000, backpressure_ns=250_000_000)
    c.kept_bytes["small"] = 7
    c.lanes["spill"].intervals.extend([(0, 100), (50, 150), (300, 350)])  # 200 ns in all
    c.waits.extend([(100, 320), (340, 400)])  # 50 + 20 + 10 of them
    c.warnings["disk full"] += 2
    report = StepReport.of([c])
    assert (report.steps, report.seconds) == (1, 2.0)
    assert (report.offloaded_bytes, report.hits, report.kept_bytes) == (10, 3, {"small": 7})
    assert (report.stall_seconds, report.backpressure_seconds) == (0.5, 0.25)
    assert report.transfer_seconds == 200e-9
    assert report.overlap == pytest.approx(1 - 80 / 200)
    assert report.warnings == ("disk full",)


def test_sums_peaks_and_weighted_overlap() -> None:
    a = counters(read_bytes=1, peak_arena_bytes=5, peak_disk_bytes=1, misses=1)
    a.lanes["spill"].intervals.append((0, 100))
    a.kept_bytes.update(small=1, error=2)
    b = counters(read_bytes=2, peak_arena_bytes=3, peak_disk_bytes=9, misses=2)
    b.lanes["spill"].intervals.append((0, 300))
    b.waits.append((0, 300))
    b.kept_bytes.update(small=4)
    both = StepReport.of([a, b])
    assert both.steps == 2
    assert both.seconds == 4.0
    assert (both.read_bytes, both.misses) == (3, 3)
    assert (both.peak_arena_bytes, both.peak_disk_bytes) == (5, 9)
    assert both.kept_bytes == {"small": 5, "error": 2}
    assert both.overlap == pytest.approx(0.25)
    assert StepReport.summed([StepReport.of([a]), StepReport.of([b])]) == both


def test_nothing_at_all() -> None:
    empty = StepReport.of([])
    assert (empty.steps, empty.overlap, empty.peak_arena_bytes) == (0, None, 0)
    assert StepReport.summed([empty, empty]) == empty
    assert "no transfers" in str(empty)


def test_warnings_are_told_once() -> None:
    a, b = counters(), counters()
    a.warnings["x"] += 1
    b.warnings.update(x=1, y=1)
    assert StepReport.of([a, b]).warnings == ("x", "y")


def test_json_has_every_field_and_a_format() -> None:
    c = counters(hits=1)
    c.kept_bytes["small"] = 7
    report = StepReport.of([c])
    parsed = json.loads(report.to_json())
    assert parsed.pop("format") == 1
    assert set(parsed) == {f.name for f in fields(StepReport)}
    assert parsed["kept_bytes"] == {"small": 7}
    assert json.loads(StepReport.of([]).to_json())["overlap"] is None


def test_printed_for_people() -> None:
    c = counters(offloaded_bytes=3 << 20, offloaded_blocks=2, hits=4, lates=5, misses=6)
    c.kept_bytes.update(small=10, parameter=2048)
    c.warnings["the disk is full"] += 1
    text = str(StepReport.of([c]))
    for words in (
        "offload: 1 step", "3 MiB in 2 storages", "2 KiB parameter, 10 bytes small",
        "4 there, 5 on their way, 6 not yet called back", "2.00 s", "the disk is full",
    ):  # fmt: skip
        assert words in text
    assert max(map(len, text.splitlines())) <= 100


def test_a_session_adds_its_steps_up(session: offload.Session) -> None:
    x = rand(64, 64).requires_grad_()
    steps = []
    for _ in range(3):
        with session.step() as step:
            chain(x, 4).backward()
        steps.append(step)
    total = session.report()
    reports = [s.report for s in steps]
    assert total.steps == 3
    for name in ("offloaded_bytes", "offloaded_blocks", "written_bytes", "hits", "misses"):
        assert getattr(total, name) == sum(getattr(r, name) for r in reports)
    # x itself, and three results; sin() saves its input
    assert [r.offloaded_bytes for r in reports] == [4 * x.nbytes] * 3


def test_every_request_is_a_hit_a_late_or_a_miss(session: offload.Session) -> None:
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        chain(x, 8).backward()
    report = step.report
    assert report.hits + report.lates + report.misses == 8


def test_bytes_add_up(session: offload.Session) -> None:
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 5)
        drain(session)
        loss.backward()
    drain(session)
    report = step.report
    assert report.offloaded_bytes == 5 * x.nbytes
    assert report.written_bytes + report.cancelled_bytes == 5 * x.nbytes
    assert report.read_bytes == 5 * x.nbytes
    assert report.forwarded_bytes == 0
    assert report.peak_disk_bytes == 5 * x.nbytes
    assert 0 <= report.overlap <= 1


def test_reasons_for_keeping(open_session, any_engine: str) -> None:
    def policy(saved: offload.SavedTensor) -> offload.Placement:
        keep = saved.size == (33,)
        return offload.Placement.KEEP if keep else offload.Placement.DISK

    session = open_session(engine=any_engine, min_offload_bytes=100, policy=policy)
    with session.step() as step:
        small = torch.ones(4, requires_grad=True)
        weight = torch.nn.Parameter(torch.ones(64))
        chosen = torch.ones(33, requires_grad=True)
        data = torch.ones(1000)
        loss = (small * small).sum() + (weight * weight).sum() + (chosen * chosen).sum()
        loss = loss + (weight[:10] * data[:10]).sum()
    kept = step.report.kept_bytes
    assert kept["small"] == 2 * 16
    assert kept["parameter"] == 2 * 256
    assert kept["policy"] == 2 * 132
    assert kept["view"] == 4000
    del loss


def test_lanes_say_what_crossed_them(session: offload.Session) -> None:
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        loss = chain(x * 1, 5)
        session.drain()
        loss.backward()
    session.drain()
    report = step.report
    lanes = {name: (lane.nbytes, lane.operations) for name, lane in report.lanes.items()}
    crossed = (5 * x.nbytes, 5)
    assert lanes == {"offload": crossed, "reload": (0, 0), "spill": crossed, "fetch": crossed}
    assert report.lanes["spill"].peak_depth >= 1
    assert report.lanes["reload"].bytes_per_s is None


def test_bytes_of_lanes_are_what_the_kernel_counted(open_session, engine: str) -> None:
    """Exactly: this process writes nothing else meanwhile, and reads only the kernel's answer."""

    def counted() -> tuple[int, int, int]:
        with open("/proc/self/io") as f:
            text = f.read()
        values = dict(line.split(": ") for line in text.splitlines())
        return int(values["wchar"]), int(values["rchar"]), len(text)

    session = open_session(engine=engine)
    x = rand(300, 300).requires_grad_()
    chain_steps = 12

    def step() -> None:  # backward comes at once: some writes are given up, some reads not needed
        with session.step():
            chain(x * 1, chain_steps).backward()
        session.drain()

    step()  # the file has its space now
    before = session.report()
    wrote, read, answer = counted()
    step()
    wrote_after, read_after, _ = counted()
    report = session.report()
    spilled = report.lanes["spill"].nbytes - before.lanes["spill"].nbytes
    fetched = report.lanes["fetch"].nbytes - before.lanes["fetch"].nbytes
    assert spilled == report.written_bytes - before.written_bytes == wrote_after - wrote
    assert fetched == report.read_bytes - before.read_bytes == read_after - read - answer
    cancelled = report.cancelled_bytes - before.cancelled_bytes
    assert spilled + cancelled == chain_steps * -(-x.nbytes // 4096) * 4096


def test_the_copy_of_the_thread_that_trains_is_not_hidden() -> None:
    c = counters()
    c.lanes["offload"].intervals.append((0, 100))
    c.lanes["spill"].intervals.append((200, 300))
    c.waits.append((0, 100))
    report = StepReport.of([c])
    assert report.overlap == 0.5
    assert report.lanes["offload"].seconds == report.lanes["spill"].seconds == 100e-9


def test_saved_is_offloaded_or_the_newest(open_session, any_engine: str) -> None:
    session = open_session(engine=any_engine, keep_last_bytes="1MiB")
    x = rand(64, 64).requires_grad_()
    with session.step() as step:
        chain(x * 1, 5).backward()
    assert step.report.saved_bytes == 5 * x.nbytes
    assert step.report.offloaded_bytes == 0
    assert "lower keep_last_bytes" in str(step.report.advice()[0])


def test_period_covers_what_is_between_steps() -> None:
    first = counters()
    second = counters(started_ns=5_000_000_000, ended_ns=6_000_000_000, since_ns=2_000_000_000)
    both = StepReport.of([first, second])
    assert (both.seconds, both.period_seconds) == (3.0, 6.0)


def test_a_step_that_was_not_entered_has_no_report(session: offload.Session) -> None:
    with pytest.raises(offload.errors.StateError, match="enter it first"):
        _ = session.step().report
