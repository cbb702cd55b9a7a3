"""Option files: what is written is read again, and mistakes are told with what was meant."""

import tempfile
from pathlib import Path

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import offload
from offload.optionfile import read_options, write_options

KNOWN = ["window_bytes", "prefetch_bytes", "verify"]


def written(directory: Path, text: str) -> Path:
    path = directory / "offload.toml"
    path.write_text(text)
    return path


@settings(max_examples=25)
@given(
    st.dictionaries(
        st.sampled_from(KNOWN),
        st.integers(0, 2**63 - 1)
        | st.booleans()
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8", exclude_categories=["Cs"])),
    ),
    st.dictionaries(st.from_regex(r"[a-z_]{1,9}", fullmatch=True), st.integers(0, 9)),
)
def test_what_is_written_is_read(options: dict[str, object], notes: dict[str, int]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "a.toml")
        write_options(path, {"verify": True, **options}, title="A title\nof two lines", notes=notes)
        assert read_options(path, KNOWN) == {"verify": True, **options}
        assert [p.name for p in Path(directory).iterdir()] == ["a.toml"]


def test_a_config_of_every_option_comes_back(tmp_path: Path) -> None:
    config = offload.Config(
        device="cpu", engine="aio", disk_dir=tmp_path, disk_budget="1GiB", host_budget="200MiB",
        min_offload_bytes=1, window_bytes="5MiB", prefetch_bytes=0, keep_last_bytes=7,
        allocator="system", verify=True, on_error="raise", io_threads=3, io_block_bytes="1MiB",
    )  # fmt: skip
    values = {k: v for k, v in attrs.asdict(config).items() if k != "device"}
    assert values["device_budget"] is None, "left to its default: there is no null in TOML"
    write_options(tmp_path / "a.toml", {**values, "device": "cpu"})
    assert offload.Config.from_file(tmp_path / "a.toml") == config


def test_a_session_of_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, '[session]\nwindow_bytes = "5MiB"\nkeep_last_bytes = 0\n')
    kept = []

    def policy(tensor: offload.SavedTensor) -> offload.Placement:
        kept.append(tensor.nbytes)
        return offload.Placement.KEEP

    options = {"device": "cpu", "disk_dir": tmp_path, "min_offload_bytes": 0}
    with offload.Session.from_file(path, policy=policy, **options) as session:
        assert session.config.window_bytes == 5 << 20
        with session.step():
            torch.ones(8, 8, requires_grad=True).exp().sum().backward()
    assert kept
    with offload.Session(config=offload.Config.from_file(path, device="cpu")) as session:
        assert session.config.keep_last_bytes == 0


def test_given_options_go_first(tmp_path: Path) -> None:
    path = written(tmp_path, "[session]\nwindow_bytes = 4096\n")
    config = offload.Config.from_file(path, window_bytes="1MiB", device="cpu")
    assert config.window_bytes == 1 << 20


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[session]\nwindow_byte = 1\n", r"no option 'window_byte'; did you mean 'window_bytes'\?"),
        ("[session]\nzzz = 1\n", "no option 'zzz'; there are .*disk_budget"),
        ("[sesion]\nwindow_bytes = 1\n", r"did you mean \[session\] by \[sesion\]"),
        ("", r"has no table \[session\]"),
        ("session = 3\n", r"has no table \[session\]"),
        ("[session\n", "is no TOML"),
        ('[session]\nwindow_bytes = "much"\n', "is no size"),
        ("[session]\nwindow_bytes = 1\n", "at least 4096"),
    ],
)
def test_mistakes(text: str, why: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match=why):
        offload.Config.from_file(path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        offload.Config.from_file(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="is no TOML"):
        offload.Config.from_file(tmp_path / "bytes.toml")


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = written(tmp_path, "old")
    with pytest.raises(OSError, match="No such file"):
        write_options(tmp_path / "no" / "a.toml", {"verify": True})
    write_options(path, {"verify": False})
    assert path.read_text() == "[session]\nverify = false\n"
