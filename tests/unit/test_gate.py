"""The budget of device memory: what may stay, and what may come back early."""

from typing import Any

from offload.tiers.gate import STRIDE, Gate, Need


def need(**fields: Any) -> Need:
    names = ("forward_bytes", "backward_bytes", "room_bytes", "reserve_bytes")
    return Need(**{**dict.fromkeys(names, 0), **fields})


def test_the_largest_storage_to_come_is_that_of_its_segment() -> None:
    gate, needs = Gate(lambda: 0), (need(), need())
    gate.begin(needs)
    gate.enter(0)
    assert [gate.note(n) for n in (10, 30, 20)] == [10, 30, 30]
    gate.enter(1)
    assert [gate.note(n) for n in (5, 5)] == [30, 5], "new: as large as any, then its own"
    gate.begin(needs)
    gate.enter(0)
    assert gate.note(10) == 30, "the same needs: the same segments"


def test_a_plan_knows_what_is_still_to_come() -> None:
    gate = Gate(lambda: 0)
    needs = need(), need(saves=(20, 40, 10))
    gate.begin(needs)
    gate.enter(1)
    assert [gate.note(n) for n in (20, 40, 10)] == [40, 10, 0]
    assert gate.note(40) == 40, "more than that: as large as any"
    gate.enter(1)
    assert [gate.note(n) for n in (40, 20, 10)] == [40, 40, 40], "it may do so again"


def test_a_plan_knows_what_is_still_to_come_in_any_order() -> None:
    gate = Gate(lambda: 0)
    gate.begin((need(saves=(20, 40, 10)),))
    gate.enter(0)
    assert [gate.note(n) for n in (40, 20, 10)] == [20, 10, 0]
    gate.enter(0)
    assert [gate.note(n) for n in (20, 50, 10)] == [40, 50, 50], "another: as large as any"


def test_what_comes_early_leaves_room_for_every_segment_in_between() -> None:
    gate = Gate(lambda: 0)
    gate.limit_bytes = 100
    gate.begin(tuple(need(room_bytes=n) for n in (50, 20, 50, 50)))
    assert not gate.may_prefetch(0, 10, []), "backward has not begun"
    gate.at = 3
    assert gate.may_prefetch(0, 20, []) and not gate.may_prefetch(0, 21, [])
    assert gate.may_prefetch(1, 50, []), "only those after it count"
    assert not gate.may_prefetch(1, 50, [(0, 1)])
    assert not gate.may_prefetch(1, 101, [])
    gate.limit_bytes = None
    assert gate.may_prefetch(0, 1 << 40, [])


def test_what_is_planned_to_stay_may_stay() -> None:
    gate = Gate(lambda: 60)
    gate.limit_bytes = 100
    gate.begin((need(keep_bytes=50, reserve_bytes=30),))
    assert gate.may_keep(0, 50, 0)
    assert not gate.may_keep(0, 11, 0), "more than planned, and 30 are needed later"
    assert gate.may_keep(0, 11, 1)


def test_what_another_forward_saved_leaves_room_for_all() -> None:
    """It stays through all of this backward, and a further forward may run before it is wanted."""
    gate = Gate(lambda: 0)
    gate.limit_bytes = 100
    gate.begin(tuple(need(room_bytes=n) for n in (50, 40, 20)), STRIDE)
    gate.at = 1
    other, own = 2 * STRIDE + 2, STRIDE
    assert gate.may_prefetch(own, 40, []) and not gate.may_prefetch(own, 41, [])
    assert gate.may_prefetch(other, 20, []) and not gate.may_prefetch(other, 21, [])
    assert gate.may_prefetch(own, 30, [(other, 10)]), "what others have early counts for it too"
    assert not gate.may_prefetch(own, 31, [(other, 10)])
    assert gate.may_keep(other, 1 << 40, 0), "of no need that is known"


def test_what_a_backward_needed_no_more_is_room() -> None:
    used = 60
    gate = Gate(lambda: used)
    gate.limit_bytes = 100
    gate.begin((need(room_bytes=50), need(room_bytes=10, working_bytes=5)))
    gate.at = 1
    assert gate.may_prefetch(0, 35, []) and not gate.may_prefetch(0, 36, [])
    used = 20
    assert gate.may_prefetch(0, 75, [])
    gate.begin((need(room_bytes=50), need(room_bytes=10)))
    gate.at = 1
    assert not gate.may_prefetch(0, 11, []), "computed again, what it saved is still to come"


def test_who_keeps_more_than_planned_is_made_up_for_by_those_that_follow() -> None:
    used = [0]
    gate = Gate(lambda: used[0])
    gate.limit_bytes = 100
    gate.begin((need(keep_bytes=40), need(keep_bytes=60)))

    def saved(segment: int, nbytes: int) -> bool:
        stays = gate.may_keep(segment, nbytes, 0)
        used[0] += nbytes if stays else 0
        return stays

    assert [saved(0, 20) for _ in range(3)] == [True, True, True], "there is room by now"
    assert [saved(1, 20) for _ in range(3)] == [True, True, False]
    gate.begin(gate.needs)
    used[0] = 60
    assert all(saved(1, 20) for _ in range(3)), "as planned: other things leave meanwhile"
