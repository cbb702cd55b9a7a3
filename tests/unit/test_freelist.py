"""The free list against a model that marks every byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.engines.freelist import FreeList

# take n, give back the i-th of what is in use, grow by n
operations = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(1, 40)),
        st.tuples(st.just("give"), st.integers(0, 100)),
        st.tuples(st.just("grow"), st.integers(1, 30)),
    ),
    max_size=60,
)


def runs(free: list[bool]) -> list[tuple[int, int]]:
    """(offset, length) of each run of free bytes."""
    found, start = [], None
    for i, is_free in enumerate([*free, False]):
        if is_free and start is None:
            start = i
        elif not is_free and start is not None:
            found.append((start, i - start))
            start = None
    return found


@given(size=st.integers(0, 100), program=operations)
def test_like_a_map_of_bytes(size: int, program: list[tuple[str, int]]) -> None:
    free, model = FreeList(size), [True] * size
    in_use: list[tuple[int, int]] = []
    for what, n in program:
        if what == "take":
            fitting = [offset for offset, length in runs(model) if length >= n]
            offset = free.take(n)
            assert offset == (fitting[0] if fitting else None), "first fit, lowest address"
            if offset is not None:
                model[offset : offset + n] = [False] * n
                in_use.append((offset, n))
        elif what == "give" and in_use:
            offset, length = in_use.pop(n % len(in_use))
            free.give(offset, length)
            model[offset : offset + length] = [True] * length
        elif what == "grow":
            free.grow(n)
            model += [True] * n
        assert free.size_bytes == len(model)
        assert free.free_bytes == sum(model)
        assert list(zip(free._offsets, free._lengths, strict=True)) == runs(model)
        last = runs(model)[-1:]
        tail = last[0][1] if last and sum(last[0]) == len(model) else 0
        assert free.tail_bytes() == tail
        high = [False] * n + model[n:]
        assert free.beyond(n) == runs(high)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 10), (5, 10), (-5, 5), (95, 10), (200, 1), (15, 10), (19, 1)]
)
def test_given_back_twice_or_from_outside(offset: int, nbytes: int) -> None:
    free = FreeList(100)
    assert free.take(20) == 0
    free.give(0, 15)  # [15, 20) is in use
    before = (list(free._offsets), list(free._lengths), free.free_bytes)
    if (offset, nbytes) == (19, 1):
        free.give(offset, nbytes)
        return
    with pytest.raises(ValueError, match="is not in use: given back twice"):
        free.give(offset, nbytes)
    assert before == (list(free._offsets), list(free._lengths), free.free_bytes)
