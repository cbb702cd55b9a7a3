"""Tables on terminals of all widths: nothing is cut off, and no figure is broken."""

import fcntl
import os
import re
import struct
import termios
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Group

import offload
from offload.cli import demo, sweep
from offload.cli.tune import _curve_table, _measured_table
from offload.probe import MachineProfile
from offload.report.step_tables import parts
from offload.report.tables import FigureTable, Prose, text_of, width_of
from tests.support import net, rand

WIDTHS = [60, 80, 100, 160]
FIGURE = re.compile(r"[\d.,]*\d(?: (?:[KMG]iB|bytes|[um]?s|GB/s|MB/s|days)\b|%|)")


def words(shown: str) -> str:
    """What is written, without lines and the space between it."""
    return " ".join(re.sub(r"[━─┃│┏┓┗┛┡┩╇┳┻└┘├┤┼┴]", " ", shown).split())


@settings(max_examples=60)
@given(
    st.lists(st.sampled_from(["", "alive", "time to plain", "predicted"]), min_size=1, max_size=9),
    st.lists(st.floats(0.001, 1e6), min_size=1, max_size=9),
    st.integers(30, 170),
)
def test_cells_stay_whole(headings: list[str], figures: list[float], width: int) -> None:
    table = FigureTable(title="[some] figures")
    for heading in headings:
        table.add_column(heading, justify="right")
    rows = [[f"{figure + i:.2f} MiB" for i, _ in enumerate(headings)] for figure in figures]
    for row in rows:
        table.add_row(*row)
    shown = text_of(table, width=width)
    assert max(map(len, shown.splitlines())) <= width
    assert shown.strip().startswith("[some] figures")
    assert "…" not in shown
    for row in rows:
        for cell in row:
            assert re.search(rf"(?<![\d.]){re.escape(cell)}\b", shown), shown


@pytest.fixture(scope="module")
def shown_by_commands() -> dict[str, Any]:
    """What commands and reports print, of a model with long names."""
    model, x = net(width=256), rand(256, 256)
    options = {"min_offload_bytes": 0, "keep_last_bytes": 0, "device": "cpu"}

    def step() -> None:
        model(x).sum().backward()

    rates = MachineProfile(
        disk_write_bytes_per_s=2e9, disk_read_bytes_per_s=2e9, copy_bytes_per_s=1e10
    )
    tuning = offload.tune(
        step, model, max_live_bytes="1KiB", max_trials=2, repeats=1, profile=rates, **options
    )
    profile = offload.profile(step, model=model, steps=2, warmup=0, **options)
    wait = offload.report.Wait(
        "stall", "encoder.layers.11.attention", "NativeLayerNormBackward0",
        "float32[2048, 256]", 12, 1.2345,
    )  # fmt: skip
    waited = replace(profile.report, waits=(wait,) * 12, warnings=("the disk is full " * 9,))
    ways = [
        sweep.Point("recompute all", 0, 12.5, 593 << 20, 600 << 20, (13.25,)),
        sweep.Point("plan", 45 << 20, 0.1281, 5 << 20, 6 << 20, (0.138,)),
    ]
    run = demo.Run(["0x1.8p+1"] * 6, ["ab"] * 6, [2.5] * 6, "p", "0x1.8p+1", 622 << 20, 1 << 30, 99)
    offloaded = replace(run, report=profile.report.to_dict())
    return {
        "profile": replace(profile, reports=(waited,) * 2).renderable(),
        "report": Group(*parts(waited)),
        "compared": (waited - replace(waited, seconds=9.5)).table(),
        "plan": offload.plan(model, step, device_budget="9MiB", **options).table(),
        "tried": _measured_table(tuning),
        "trade-off": _curve_table(tuning),
        "sweep": sweep.table_of(ways),
        "demo": demo._summary(run, offloaded),
        "demo, steps": demo._curves(run, offloaded),
    }


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_printed_is_readable(shown_by_commands: dict[str, Any], width: int) -> None:
    for name, part in shown_by_commands.items():
        wide, shown = text_of(part, width=1000), text_of(part, width=width)
        assert max(map(len, shown.splitlines())) <= width, name
        assert "…" not in shown, name
        missing = [figure for figure in FIGURE.findall(words(wide)) if figure not in shown]
        assert not missing, (name, missing, shown)


def test_words_are_wrapped_between_figures() -> None:
    text = "waited 12.5 ms of 2.25 s for 3 GiB"
    shown = text_of(Prose(text), width=11)
    assert shown.replace("\n", " ") == text
    assert shown.splitlines() == ["waited", "12.5 ms of", "2.25 s for", "3 GiB"]


def test_the_width_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "47")
    assert width_of(None) == 47
    for nothing in ("", "0", "wide", "-3"):
        monkeypatch.setenv("COLUMNS", nothing)
        assert width_of(None) == 1000
    ours, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stream:
        fcntl.ioctl(stream, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 91, 0, 0))
        assert width_of(stream) == 91
    os.close(ours)
