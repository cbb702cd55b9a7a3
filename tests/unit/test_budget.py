"""The ledger: a limit that large items may pass, reservations that end with their object."""

import functools
import gc

from hypothesis import given
from hypothesis import strategies as st

from offload.engines.budget import Budget, Reservation
from tests.support import in_threads


@given(
    limit=st.integers(0, 100),
    program=st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 150)), max_size=60),
)
def test_never_above_the_limit(limit: int, program: list[tuple[bool, int, int]]) -> None:
    budget, held = Budget(limit), []
    peak = 0
    for reserve, least, n in program:
        used = sum(r.nbytes for r in held)
        if reserve:
            got = budget.reserve(n, least=least)
            assert (got is not None) == (used + n <= limit or used + n <= least * n)
            if got is not None:
                held.append(got)
        elif held:
            held.pop(n % len(held))
        got = None
        used = sum(r.nbytes for r in held)
        peak = max(peak, used)
        assert budget.used_bytes == used
        assert budget.peak_bytes == peak
        newest = held[-1].nbytes if held else 0
        assert used <= max(limit, 2 * newest)


def test_a_reservation_in_a_dead_cycle_is_returned() -> None:
    budget = Budget(10)
    cycle: list[object] = [budget.reserve(10)]
    cycle.append(cycle)
    assert budget.reserve(1) is None
    del cycle
    gc.collect()
    assert budget.used_bytes == 0


def test_reservations_may_die_on_any_thread() -> None:
    budget = Budget(1000)
    held = [budget.reserve(1) for _ in range(1000)]
    in_threads(*(functools.partial(held.__delitem__, slice(0, 250)) for _ in range(4)))
    assert budget.used_bytes == 0
    assert isinstance(budget.reserve(1000), Reservation)
