"""Groups of ranks, one for all tests of a number of ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.ranks import Ranks

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder starts processes."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.distributed)


class _Groups:
    """Groups by their size, begun when they are first asked for, and again if one has died."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._groups: dict[int, Ranks] = {}

    def of(self, world_size: int) -> Ranks:
        group = self._groups.get(world_size)
        if group is None or not group.alive:
            if group is not None:
                group.close()
            group = self._groups[world_size] = Ranks(world_size, self._factory.mktemp("ranks"))
        return group

    def close(self) -> None:
        for group in self._groups.values():
            group.close()


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Groups]:
    """Groups of ranks of any size."""
    groups = _Groups(tmp_path_factory)
    yield groups
    groups.close()


@pytest.fixture
def two(groups: _Groups) -> Ranks:
    """Two ranks."""
    return groups.of(2)


@pytest.fixture
def four(groups: _Groups) -> Ranks:
    """Four ranks."""
    return groups.of(4)
