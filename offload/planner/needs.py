"""What the gate is told of a plan: the room that each segment needs and leaves to others."""

from __future__ import annotations

from collections.abc import Iterable

from offload.planner.model import Chain, Option
from offload.planner.predict import Walk, caps
from offload.planner.profile import Budgets, ModelProfile
from offload.tiers.gate import Need
from offload.units import MAX_BYTES

__all__ = ["fits_under", "laid_out", "need_of", "needs_under", "uniform_choice"]


def laid_out(needs: Iterable[tuple[bool, Need]]) -> tuple[Need, ...]:
    """Alternating: what lies between, a segment, and so on. Nothing between is no need."""
    found: list[Need] = []
    between = Need(0, 0, MAX_BYTES, 0)
    for is_segment, need in needs:
        if is_segment:
            found += [between, need]
            between = Need(0, 0, need.room_bytes, need.reserve_bytes)
        else:
            between = need
    return (*found, between)


def _uniform(profile: ModelProfile, budgets: Budgets, action: str) -> Walk:
    """Every segment by one action."""
    chain = profile.chain(budgets)
    return Walk(chain, uniform_choice(chain, action))


def fits_under(profile: ModelProfile, budgets: Budgets, action: str) -> bool:
    """Whether a pass in which every segment goes by this action keeps to the budgets."""
    return _uniform(profile, budgets, action).feasible


def needs_under(profile: ModelProfile, budgets: Budgets, action: str) -> tuple[Need, ...]:
    """For the gate, while every segment goes by one action, before there is a plan."""
    walk = _uniform(profile, budgets, action)
    rooms = caps(walk)
    return laid_out(
        (not s.is_gap, need_of(walk, i, rooms[i])) for i, s in enumerate(walk.chain.segments)
    )


def spare_under(profile: ModelProfile, budgets: Budgets, action: str) -> int:
    """What may be there of others when such a pass begins, so that it keeps to the budget."""
    walk = _uniform(profile, budgets, action)
    room = min(*walk.forward_rooms, *walk.backward_rooms)
    return int(room + walk.resident[0] + profile.leftover_bytes)


def need_of(walk: Walk, i: int, room: float) -> Need:
    """Of entry ``i``, where so much may be there early of what comes before it."""
    segment, option = walk.chain.segments[i], walk.options[i]
    forward = option.present_bytes + segment.forward_bytes
    shared_bytes = sum(shared.nbytes for shared in segment.shared)
    return Need(
        forward_bytes=int(forward),
        backward_bytes=int(_appears(walk, i)),
        room_bytes=int(min(room, MAX_BYTES)),
        reserve_bytes=int(_reserve(walk, i)),
        # Small storages and what a later segment owns are kept here as well.
        keep_bytes=int(option.resident_bytes + segment.forward_bytes + shared_bytes),
        working_bytes=-1 if _is_computed_again(option) else int(segment.backward_bytes),
        saves=option.saves,
    )


def _appears(walk: Walk, i: int) -> float:
    """Bytes that backward of ``i`` adds to what stays."""
    segment, option = walk.chain.segments[i], walk.options[i]
    there = 0.0 if _is_computed_again(option) else min(option.resident_bytes, segment.saved_bytes)
    return segment.saved_bytes - there + segment.backward_bytes + option.returning_bytes


def _is_computed_again(option: Option) -> bool:
    return option.action.startswith(("recompute", "selective"))


def _reserve(walk: Walk, i: int) -> float:
    """The most that what follows ``i`` needs at one time, where it is not free to leave."""
    most = stays = 0.0
    for k in range(i + 1, len(walk.options)):
        option, segment = walk.options[k], walk.chain.segments[k]
        may_leave = not segment.is_gap and option.action == "keep"
        if not may_leave:
            forward = option.present_bytes + segment.forward_bytes + segment.lingering_bytes()
            most = max(most, stays + max(forward, option.resident_bytes + _appears(walk, k)))
            stays += option.resident_bytes
    return most


def uniform_choice(chain: Chain, action: str) -> tuple[int, ...]:
    """The same option for every segment, the leanest for one that does not offer it. What lies
    between them leaves if something of the segments does.
    """
    stays = action.rpartition("+")[2] in ("keep", "recompute")
    names = [
        ["keep"] if s.is_gap and stays else [o.action for o in s.options] for s in chain.segments
    ]
    return tuple(n.index(action) if action in n else len(n) - 1 for n in names)
