"""Agreement: whatever ranks do, those that go on go on alike."""

import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.distributed.agreement import Agreement

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")


def store() -> Any:
    found = dist.HashStore()
    found.set_timeout(timedelta(seconds=5))
    return found


def together(parts: list[Any]) -> list[Any]:
    """What each returns, run at once."""
    results: list[Any] = [None] * len(parts)

    def run(number: int) -> None:
        results[number] = parts[number]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "it hangs"
    return results


def test_all_have_what_one_makes_of_all() -> None:
    shared = store()

    def part(rank: int) -> Any:
        agreement = Agreement(shared, rank, [0, 1, 2], about="a")
        return lambda: [agreement.decide(rank + 10 * i, sum) for i in range(3)]

    expected = [3, 33, 63]
    assert together([part(rank) for rank in range(3)]) == [expected] * 3
    assert shared.num_keys() <= 3 + 4, "what was decided before is forgotten"


def test_those_about_the_same_decide_together() -> None:
    shared = store()

    def part(rank: int) -> Any:
        agreement = Agreement(shared, rank, range(4), about="ab"[rank % 2])
        return lambda: agreement.decide(rank, list)

    assert together([part(rank) for rank in range(4)]) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_what_one_raises_all_raise() -> None:
    shared = store()

    def lead(said: list[int]) -> None:
        raise ValueError(f"of {len(said)}")

    def part(rank: int) -> Any:
        agreement = Agreement(shared, rank, range(2), about="")

        def run() -> str:
            with pytest.raises(ValueError, match="of 2") as error:
                agreement.decide(0, lead)
            return str(error.value)

        return run

    assert together([part(rank) for rank in range(2)]) == ["of 2"] * 2


def test_a_rank_that_has_none_is_named() -> None:
    agreement = Agreement(store(), 0, range(2), about="", patience_seconds=0.01)
    assert agreement.decide(0, list) is None
    assert agreement.over == "rank 1 has not come within 0 s"


class InterruptedStore:
    """Raises when it is asked for the ``at``-th time."""

    def __init__(self, inner: Any, at: int) -> None:
        self._inner, self._at = inner, at

    def __getattr__(self, name: str) -> Any:
        self._at -= 1
        if self._at == 0:
            raise KeyboardInterrupt
        return getattr(self._inner, name)


@settings(max_examples=40, deadline=None)
@given(
    delays=st.lists(st.sampled_from([0, 0, 0, 0.002, 0.03]), min_size=9, max_size=9),
    leaves=st.tuples(*[st.sampled_from([3, 3, 0, 1, 2])] * 3),
    interrupted=st.sampled_from([0, 0, 2, 5, 9, 14]),
)
def test_nobody_goes_on_with_what_another_has_not(
    delays: list[float], leaves: tuple[int, ...], interrupted: int
) -> None:
    """Ranks come late, leave, or are interrupted: each has a part of one sequence of decisions, and
    who has less than another has ended before.
    """
    shared = store()

    def part(rank: int) -> Any:
        mine = InterruptedStore(shared, interrupted + 1) if rank == 1 and interrupted else shared
        agreement = Agreement(mine, rank, range(3), about="", patience_seconds=0.01)

        def run() -> tuple[list[Any], bool]:
            found = []
            try:
                for i in range(3):
                    time.sleep(delays[3 * rank + i])
                    if i == leaves[rank]:
                        agreement.leave()
                        return found, True
                    found.append(agreement.decide(rank, lambda said, i=i: (i, tuple(said))))
            except KeyboardInterrupt:
                assert agreement.over
                return found, True
            return found, False

        return run

    results = together([part(rank) for rank in range(3)])
    going = [found for found, gone in results if not gone]
    assert all(found == going[0] for found in going), "those that went on went on alike"
    for found, _ in results:
        decided = [f for f in found if f is not None]
        assert found == decided + [None] * (len(found) - len(decided)), "over is over"
        assert decided == [(i, (0, 1, 2)) for i in range(len(decided))]
