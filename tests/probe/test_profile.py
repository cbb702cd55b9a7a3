"""The remembered profile: kept, found again, and replaced when it cannot be trusted."""

import json
import random
from pathlib import Path

import pytest

from offload.config import Config
from offload.probe import MachineProfile, machine_profile
from offload.probe.disk import DiskRates
from offload.probe.profile import (
    MAX_AGE_SECONDS,
    cache_path,
    load_profile,
    save_profile,
)
from offload.probe.verdicts import Survey
from offload.units import MIB
from tests.probe.values import LINK, RATES, survey_with

PROFILE = MachineProfile.of(survey_with(link=LINK, disk=(RATES, DiskRates(1, MIB, 1, 2, 3, 4))))


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(device="cpu", disk_dir=tmp_path)


class Counting:
    """A survey that counts how often it is made."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, config: Config) -> Survey:
        self.count += 1
        return survey_with()


def test_rates_come_from_the_survey() -> None:
    assert PROFILE.disk_write_bytes_per_s == 5e9 and PROFILE.disk_duplex_read_bytes_per_s == 1.5e9
    assert PROFILE.link_out_bytes_per_s == 25e9 and PROFILE.link_duplex_in_bytes_per_s == 20e9
    assert PROFILE.copy_bytes_per_s == 15e9
    empty = MachineProfile.of(survey_with(disk=()))
    assert empty.disk_write_bytes_per_s is None and empty.link_in_bytes_per_s is None


def test_it_is_measured_once(config: Config) -> None:
    measure = Counting()
    first = machine_profile(config, measure=measure)
    assert machine_profile(config, measure=measure) == first
    assert measure.count == 1
    machine_profile(config, refresh=True, measure=measure)
    assert measure.count == 2


def test_the_rates_are_those_of_the_configs_setting(config: Config, tmp_path: Path) -> None:
    save_profile(config, PROFILE)
    one = Config(device="cpu", disk_dir=tmp_path, io_threads=1, io_block_bytes="1MiB")
    assert cache_path(one) == cache_path(config)
    assert machine_profile(one).disk_write_bytes_per_s == 1
    assert machine_profile(config).disk_write_bytes_per_s == 5e9


def test_directories_of_one_file_system_share(config: Config, tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    below = Config(device="cpu", disk_dir=tmp_path / "below")
    assert cache_path(below) == cache_path(config)
    assert cache_path(Config(device="cpu", disk_dir=tmp_path, engine="aio")) != cache_path(config)


def _change(path: Path, **changes: object) -> None:
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 0},
        {"format": "1"},
        {"measured_at": -MAX_AGE_SECONDS},
        {"measured_at": 1e12},
        {"measured_at": "yesterday"},
        {"key": {"machine": "another"}},
        {"profile": {}},
        {"profile": {**PROFILE.to_dict(), "disk_write_bytes_per_s": "fast"}},
        {"profile": {**PROFILE.to_dict(), "disk_write_bytes_per_s": -1.0}},
        {"profile": {**PROFILE.to_dict(), "disk_write_bytes_per_s": float("nan")}},
        {"profile": {**PROFILE.to_dict(), "warp": 9}},
        {"profile": {**PROFILE.to_dict(), "disk_rates": [1]}},
        {"profile": None},
    ],
)
def test_what_cannot_be_trusted_is_measured_again_and_replaced(
    config: Config, changes: dict[str, object]
) -> None:
    path = save_profile(config, PROFILE)
    assert path is not None and load_profile(config) == PROFILE
    _change(path, **changes)
    assert load_profile(config) is None
    measure = Counting()
    machine_profile(config, measure=measure)
    assert measure.count == 1 and load_profile(config) is not None


def test_damaged_files_are_never_trusted_wrongly(config: Config) -> None:
    path = save_profile(config, PROFILE)
    assert path is not None
    whole = path.read_bytes()
    generator = random.Random(0)
    for _ in range(200):
        path.write_bytes(whole[: generator.randrange(len(whole))])
        assert load_profile(config) is None
    for text in (b"", b"[]", b"null", b"\xff\xfe", b"{" * 2000):
        path.write_bytes(text)
        assert load_profile(config) is None


def test_without_a_place_for_the_cache_it_works_all_the_same(
    config: Config, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "file"))
    measure = Counting()
    machine_profile(config, measure=measure)
    machine_profile(config, measure=measure)
    assert measure.count == 2


def test_nothing_but_the_profile_is_left(config: Config, cache: Path) -> None:
    save_profile(config, PROFILE)
    save_profile(config, PROFILE)
    assert len(list((cache / "offload").iterdir())) == 1


def test_really_measured(tmp_path: Path) -> None:
    config = Config(device="cpu", disk_dir=tmp_path)
    profile = machine_profile(config)
    assert profile.disk_write_bytes_per_s and profile.disk_duplex_read_bytes_per_s
    assert profile.copy_bytes_per_s and profile.flops_per_s
    assert profile.link_out_bytes_per_s is None
    assert list(tmp_path.iterdir()) == []
    assert machine_profile(config) == profile
