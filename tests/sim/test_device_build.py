"""A build that fails says why, and one that is there is not made again."""

from pathlib import Path

import pytest
from simdev import build as building


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty sources and an empty cache."""
    for unit in building.UNITS:
        (tmp_path / "csrc" / unit).mkdir(parents=True)
    monkeypatch.setattr(building, "SOURCES", tmp_path / "csrc")
    monkeypatch.setattr(building, "CACHE", tmp_path / "cache")
    return tmp_path / "csrc"


def test_the_message_of_a_failed_build_is_the_compilers(sources: Path):
    (sources / "runtime" / "a.cc").write_text("#error this is wrong\n")
    with pytest.raises(building.BuildError, match="#error this is wrong"):
        building.build()
    assert [path.name for path in building.CACHE.iterdir()] == ["lock"]


def test_a_missing_compiler_is_named(sources: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(building.BuildError, match="no-such-compiler cannot be run"):
        building.build()


def test_what_was_built_is_found_again_until_a_source_changes(sources: Path):
    source = sources / "glue" / "a.cc"
    source.write_text("int one() { return 1; }\n")
    first = building.build()
    made_ns = first.stat().st_mtime_ns
    assert (building.build(), first.stat().st_mtime_ns) == (first, made_ns)
    source.write_text("int one() { return 2; }\n")
    assert building.build() != first
