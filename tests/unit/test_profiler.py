"""The profiler: what it measures, what it claims, what it writes, and its command."""

import itertools
import json
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from offload.__main__ import main
from offload.profiler import Profile, Timeline, Verdict
from offload.report.trace import TRANSFERS, WAITS, Event, merged, total_ns
from tests.support import rand

MOVE_ALL = {"min_offload_bytes": 0, "keep_last_bytes": 0}


class Net(nn.Module):
    """A few layers of different cost."""

    def __init__(self) -> None:
        super().__init__()
        layers = [(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(3)]
        self.layers = nn.Sequential(*itertools.chain.from_iterable(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Profile, dict[str, Path]]:
    """A profile whose reads are all waited for, and its files."""
    torch.manual_seed(0)
    model, x = Net(), rand(512, 64)
    options = {**MOVE_ALL, "prefetch_bytes": 0, "window_bytes": "1MiB"}
    disk_dir = tmp_path_factory.mktemp("disk")
    found = offload.profile(
        lambda: model(x).backward(), model=model, steps=4, warmup=1, disk_dir=disk_dir, **options
    )
    out = tmp_path_factory.mktemp("out") / "made" / "for it"
    return found, {path.name: path for path in found.save(out, png=True)}


# -- the verdict -----------------------------------------------------------------------------------


@pytest.mark.parametrize("pairs", range(1, 13))
def test_confidence_is_that_of_all_sign_patterns(pairs: int) -> None:
    """The median is within the interval unless too many of the ratios fall on one side of it."""
    verdict = Verdict.of([1.0] * pairs, [float(i) for i in range(1, pairs + 1)])
    cut = round(verdict.low) - 1
    patterns = list(itertools.product([0, 1], repeat=pairs))
    inside = sum(cut < sum(p) < pairs - cut for p in patterns)
    assert verdict.confidence == pytest.approx(inside / len(patterns))
    assert verdict.high == pairs - cut
    if pairs >= 6:
        assert verdict.confidence >= 0.95
        wider = sum(cut + 1 < sum(p) < pairs - cut - 1 for p in patterns) / len(patterns)
        assert wider < 0.95, "a narrower interval would have done"


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=20))
def test_nothing_is_claimed_of_the_same_times(seconds: list[float]) -> None:
    assert not Verdict.of(seconds, seconds).is_claimed
    assert "No claim" in str(Verdict.of(seconds, seconds))


def test_what_verdicts_say() -> None:
    assert "too few" in str(Verdict.of([1.0] * 5, [2.0] * 5))
    assert "100.0% longer" in str(Verdict.of([1.0] * 6, [2.0] * 6))
    assert "50.0% shorter" in str(Verdict.of([2.0] * 6, [1.0] * 6))
    assert "within noise" in str(Verdict.of([1.0] * 6, [0.9, 1.1] * 3))


# -- the timeline ----------------------------------------------------------------------------------

spans = st.tuples(st.integers(1, 200), st.integers(1, 40)).map(lambda p: (p[0], p[0] + p[1]))
events = st.lists(
    st.builds(
        lambda name, span: Event(name, 1, 8, *span), st.sampled_from([*TRANSFERS, *WAITS]), spans
    ),
    max_size=25,
)


@given(events, st.booleans())
def test_compute_and_waits_fill_the_step(busy: list[Event], host_copies: bool) -> None:
    moments = [Event("begin", -1, 0, 0, 0), Event("backward", -1, 0, 120, 120)]
    end = Event("end", -1, 0, 300, 300)
    timeline = Timeline.of([*busy, *moments, end], [], host_copies=host_copies)
    stopped = {*WAITS, "offload"} if host_copies else set(WAITS)
    away = merged((e.start_ns, e.end_ns) for e in busy if e.name in stopped)
    compute = timeline.tracks["compute"]
    computing = merged((s.start_ns, s.end_ns) for s in compute)
    assert total_ns(computing) == sum(s.duration_ns for s in compute), "no two overlap"
    assert merged([*computing, *away]) == [(0, 300)]
    assert total_ns(computing) + total_ns(away) == 300
    assert {s.name for s in compute if s.end_ns <= 120} <= {"forward"}
    assert {s.name for s in compute if s.start_ns >= 120} <= {"backward"}


@given(events)
def test_slices_of_a_row_do_not_overlap(busy: list[Event]) -> None:
    timeline = Timeline.of(busy, [], host_copies=False)
    for lane in (*TRANSFERS, *WAITS):
        slices = timeline.tracks[lane]
        assert sorted((s.start_ns, s.end_ns) for s in slices) == sorted(
            (e.start_ns, e.end_ns) for e in busy if e.name == lane
        )
        for row in {s.row for s in slices}:
            of_row = sorted((s.start_ns, s.end_ns) for s in slices if s.row == row)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(of_row))


# -- the files -------------------------------------------------------------------------------------


def slices_of(trace: dict[str, Any]) -> dict[str, list[tuple[int, int]]]:
    """From a trace file, by name of the thread without its row: nanoseconds."""
    threads = {
        e["tid"]: e["args"]["name"].partition(" (")[0]
        for e in trace["traceEvents"]
        if e["name"] == "thread_name"
    }
    found: dict[str, list[tuple[int, int]]] = {}
    for e in trace["traceEvents"]:
        if e["ph"] == "X":
            start = round(1e3 * e["ts"])
            span = (start, start + round(1e3 * e["dur"]))
            found.setdefault(threads[e["tid"]], []).append(span)
    return found


def overlap_of(trace: dict[str, Any]) -> float:
    """Share of the time with a transfer in which the computation ran too: by going from edge to
    edge of all slices, which is not how the report finds it.
    """
    slices = slices_of(trace)
    edges: list[tuple[int, str, int]] = []
    for name, lane in slices.items():
        kind = "transfer" if name in TRANSFERS else name
        if kind in ("transfer", "compute"):
            edges += [(start, kind, 1) for start, _ in lane] + [(end, kind, -1) for _, end in lane]
    running = {"transfer": 0, "compute": 0}
    transfer = both = last = 0
    for at, kind, change in sorted(edges):
        transfer += (at - last) * (running["transfer"] > 0)
        both += (at - last) * (running["transfer"] > 0 and running["compute"] > 0)
        running[kind] += change
        last = at
    return both / transfer


def test_overlap_is_that_of_the_trace_file(measured: tuple[Profile, dict[str, Path]]) -> None:
    profile, files = measured
    trace = json.loads(files["trace.json"].read_text())
    assert profile.report.overlap is not None and 0 < profile.report.overlap < 1
    assert overlap_of(trace) == pytest.approx(profile.report.overlap, abs=0.02)


def test_trace_file_has_every_byte_of_the_report(measured: tuple[Profile, dict[str, Path]]) -> None:
    profile, files = measured
    trace = json.loads(files["trace.json"].read_text())
    moved = dict.fromkeys(TRANSFERS, 0)
    for e in trace["traceEvents"]:
        if e["ph"] == "X" and e["cat"] in moved:
            moved[e["cat"]] += e["args"]["bytes"]
    assert moved == {name: lane.nbytes for name, lane in profile.report.lanes.items()}
    assert moved["spill"] > 0 and moved["fetch"] > 0
    stalled_us = sum(e["dur"] for e in trace["traceEvents"] if e.get("cat") == "stall")
    assert stalled_us / 1e6 == pytest.approx(profile.report.stall_seconds)


def test_trace_file_is_well_formed(measured: tuple[Profile, dict[str, Path]]) -> None:
    """Slices of a thread nest or lie apart, and counters and threads have names."""
    profile, files = measured
    trace = json.loads(files["trace.json"].read_text())
    by_thread: dict[int, list[tuple[float, float]]] = {}
    for e in trace["traceEvents"]:
        assert e["ph"] in "MXC" and e["pid"] == 1
        if e["ph"] == "X":
            assert e["ts"] >= 0 and e["dur"] >= 0
            by_thread.setdefault(e["tid"], []).append((e["ts"], -e["dur"]))
    for slices in by_thread.values():
        open_until: list[float] = []
        for ts, minus_dur in sorted(slices):
            while open_until and open_until[-1] <= ts + 1e-3:
                open_until.pop()
            assert not open_until or ts - minus_dur <= open_until[-1] + 1e-3
            open_until.append(ts - minus_dur)
    counters = {e["name"] for e in trace["traceEvents"] if e["ph"] == "C"}
    assert counters == {"activations", "host memory", "disk"}
    names = set(slices_of(trace))
    assert {"plain steps", "modules", "compute", "offload", "spill", "fetch", "stall"} <= names
    assert len(slices_of(trace)["plain steps"]) == len(profile.reports) == 4


class Balanced(HTMLParser):
    """Checks that every tag is closed, and collects text and what the page would load."""

    EMPTY = frozenset({"meta", "link", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.EMPTY:
            self.open.append(tag)
        self.loads += [v or "" for k, v in attrs if k in ("src", "href", "xlink:href")]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_page_is_complete_and_needs_nothing_else(measured: tuple[Profile, dict[str, Path]]) -> None:
    profile, files = measured
    page = files["profile.html"].read_text()
    parsed = Balanced()
    parsed.feed(page)
    assert parsed.open == [] and parsed.loads == []
    assert "url(" not in page.replace("url(#plot)", "") and "@import" not in page
    text = " ".join(parsed.text)
    assert str(profile.verdict) in text
    for words in ("computing, backward", "layers.0", "activations alive, plain: peak"):
        assert words in text
    assert page.count("<rect") > len(profile.shown.tracks["spill"])


def test_names_are_escaped_on_the_page(measured: tuple[Profile, dict[str, Path]]) -> None:
    profile, _ = measured
    fields = {f: getattr(profile, f) for f in profile.__dataclass_fields__}
    page = Profile(**{**fields, "name": "<script>alert(1)</script>"}).page()
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_page_draws_itself_in_a_browser(measured: tuple[Profile, dict[str, Path]]) -> None:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium here")
    _, files = measured
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         files["profile.html"].as_uri()],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    ticks = done.stdout.partition('<g class="ticks">')[2].partition("</g>")[0]
    assert ticks.count("<text") >= 3, "the script of the page drew them"
    assert 'scale(1 1)"' in done.stdout


def test_picture_is_a_png(measured: tuple[Profile, dict[str, Path]]) -> None:
    assert measured[1]["profile.png"].read_bytes().startswith(b"\x89PNG")


def test_document_has_conditions_and_every_step(measured: tuple[Profile, dict[str, Path]]) -> None:
    profile, files = measured
    document = json.loads(files["profile.json"].read_text())
    assert document["format"] == 1
    assert {"device", "torch", "cpus", "threads"} <= document["conditions"].keys()
    assert len(document["plain_seconds"]) == len(document["steps"]) == 4
    assert document["verdict"]["is_claimed"] is False  # of four pairs nothing can be claimed
    assert document["report"]["steps"] == 4
    assert document["plain_peak_live_bytes"] > document["offloaded_peak_live_bytes"] > 0
    assert "4 pairs of steps" in str(profile)


# -- what cannot be profiled -----------------------------------------------------------------------


def test_steps_with_nothing_to_see_say_what_to_do(tmp_path: Path) -> None:
    model, x = Net(), rand(64, 64)

    def without_gradients() -> None:
        with torch.no_grad():
            model(x)

    def check(step: Any, why: str, **options: Any) -> None:
        with pytest.raises(offload.OffloadError, match=why):
            offload.profile(step, model=model, steps=1, warmup=0, disk_dir=tmp_path, **options)

    def backward() -> None:
        model(x).backward()

    check(without_gradients, "saves nothing for backward.*no_grad")
    check(lambda: model(x), "ran no backward")
    check(backward, r"largest storage saved has 64 KiB, less than min_offload_bytes \(1 MiB\)")
    check(backward, r"fill a bundle \(4 MiB\); lower bundle_bytes", min_offload_bytes=1)
    check(backward, "stay, as the newest.*lower keep_last_bytes", min_offload_bytes=0)
    with pytest.raises(offload.OffloadError, match="no room for it"):
        offload.profile(backward, model=model, steps=1, warmup=0, disk_budget=0, **MOVE_ALL)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="give a function"):
        offload.profile("step")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        offload.profile(print, model=print)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least 1 step"):
        offload.profile(print, steps=0)
    with pytest.raises(TypeError):
        offload.profile(lambda: Net()(rand(8, 64)).backward(), window="1MiB")


def test_what_a_step_raises_comes_through() -> None:
    def step() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        offload.profile(step)


# -- the command -----------------------------------------------------------------------------------

TINY = ["profile", "gpt-tiny", "--steps", "2", "--warmup", "0"]
MOVES = [
    "--option",
    "min_offload_bytes=1KiB",
    "--option",
    "bundle_bytes=16KiB",
    "--option",
    "keep_last_bytes=0",
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_command_writes_and_tells(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(*TINY, *MOVES, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert {p.name for p in out.iterdir()} == {"profile.html", "profile.json", "trace.json"}
    told = " ".join(result.output.split())
    for words in ("gpt-tiny: 2 pairs", "activations alive, peak", "No claim: 2 pairs", "Written:"):
        assert words in told


def test_command_prints_json_and_nothing_else(tmp_path: Path) -> None:
    result = run(*TINY, *MOVES, "--out", str(tmp_path), "--json")
    assert result.exit_code == 0
    assert json.loads(result.output) == json.loads((tmp_path / "profile.json").read_text())


def test_command_quietly_prints_the_verdict(tmp_path: Path) -> None:
    result = run(*TINY, *MOVES, "--out", str(tmp_path), "--quiet")
    assert result.output.startswith("No claim: 2 pairs")
    assert len(result.output.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (["gpt-tiy"], 2, "did you mean 'gpt-tiny'?"),
        (["no_such_module:step"], 2, "there is no module 'no_such_module'"),
        (["gpt-tiny", "--steps", "0"], 2, "not in the range"),
        (["gpt-tiny", "--out", "{script}/below"], 2, "choose another --out"),
        (["gpt-tiny", "--option", "window=1"], 2, "no option 'window'"),
        (["gpt-tiny", "--option", "min_offload_bytes=1GiB"], 2, "lower it, to"),
        (["{script}:raises", *MOVES], 3, "RuntimeError: of mine ({script}:5)"),
        (["{script}:breaks", *MOVES], 3, "ZeroDivisionError: division by zero ({script}:8)"),
        (["{script}:returns", *MOVES], 2, "return a step"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str], status: int, why: str, tmp_path: Path
) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "import torch\n\ndef raises():\n    def step():\n        raise RuntimeError('of mine')\n"
        "    return step\ndef breaks():\n    1 / 0\ndef returns():\n    return 3\n"
    )
    filled = [a.replace("{script}", str(script)) for a in arguments]
    result = run("profile", "--out", str(tmp_path / "out"), *filled)
    assert result.exit_code == status, result.output
    assert "".join(why.replace("{script}", str(script)).split()) in "".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_a_picture_without_matplotlib_is_refused_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*TINY, *MOVES, "--out", str(tmp_path / "out"), "--png")
    assert result.exit_code == 2 and "pip install 'offload[plot]'" in result.output
    assert not (tmp_path / "out").exists()
