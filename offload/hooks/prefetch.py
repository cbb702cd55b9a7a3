"""Prefetcher: which blocks backward will ask for next, brought back ahead of it within the byte
window.

It only changes speed: a wrong guess costs a read that somebody needs later or nobody does, never a
result.

[Note: the order of backward] Autograd runs the nodes of one device in falling order of their
sequence numbers, which forward hands out in rising order, and one node asks for its saved tensors
in the order it saved them. So within a forward the order is (-node, index of the save); plain
reverse order of the saves is wrong. Several forwards may wait for their backward (pipelines run
them first in, first out), so the walk starts at the ticket that was just asked for and stays in
its forward. What this cannot know (which forward comes next, the region of a checkpoint whose
boundary is numbered before it) is learned: a step that saves the same sizes in the same order as
the previous one is taken to ask in the same order as well.

[Note: forwards between backwards] Pipeline schedules run a forward between two backwards, and some
run backward in two halves that ask for the same tensors. So a walk in a learned order waits where
it comes to a forward that is not yet there, and goes on as soon as that is complete. What it passes
that is not brought back because it has not left, or has to be asked for once before, is looked at
again.
"""

import threading
import weakref
from collections import deque
from collections.abc import Iterator

import torch

from offload.blocks.block import State
from offload.blocks.tickets import Bundle, Ticket
from offload.tiers import Tiers

MAX_FORWARDS = 256  # that one recording covers
_MAX_DEFERRED = 64
_MAX_LOOKED_AT = 128  # in one go; the next request goes on from there
_Place = tuple[int, int]  # number of the tape in the step, ordinal of the ticket on the tape
_Request = tuple[_Place, int]  # that place for the n-th time, counted from 0
_Claim = Ticket | Bundle  # a bundle is on the tape for the tickets of all its members
_Deferred = deque[tuple[weakref.ref[_Claim], _Request]]


class Tape:
    """The tickets of one forward of one thread, as they were saved."""

    def __init__(self, number: int, recorded: int | None) -> None:
        self.number = number
        self.signature = 0  # of the sizes saved so far
        self.recorded = recorded  # of all that the one with its number saved in the recorded step
        self._nodes: list[int] = []
        self._tickets: list[weakref.ref[_Claim]] = []
        self._order: list[int] = []
        self._rank: list[int] = []

    def append(self, ticket: _Claim, node: int) -> None:
        """Add the newest ticket; ``node`` is the sequence number of the operation that saves it."""
        ticket.tape, ticket.ordinal = self, len(self._tickets)
        self._nodes.append(node)
        self._tickets.append(weakref.ref(ticket))
        self.signature = hash((self.signature, ticket.block.nbytes))

    def ticket(self, ordinal: int) -> _Claim | None:
        """The ticket with this ordinal, if it is alive."""
        return self._tickets[ordinal]() if ordinal < len(self._tickets) else None

    def order(self) -> list[int]:
        """The ordinals in the order backward is predicted to ask for them."""
        if len(self._order) != len(self._tickets):
            self._order = sorted(range(len(self._tickets)), key=lambda i: (-self._nodes[i], i))
            self._rank = [0] * len(self._order)
            for rank, ordinal in enumerate(self._order):
                self._rank[ordinal] = rank
        return self._order

    def rank(self, ordinal: int) -> int:
        """The place of a ticket in ``order()``."""
        self.order()
        return self._rank[ordinal]


class Recording:
    """In which order the previous step asked, and what it had saved."""

    def __init__(self, tapes: list[Tape], asked: list[_Request]) -> None:
        self.signatures = [tape.signature for tape in tapes]
        self.order = asked
        self.rank = {request: rank for rank, request in enumerate(asked)}

    def signature(self, number: int) -> int | None:
        """Of the forward with this number; ``None`` if there was none."""
        return self.signatures[number] if number < len(self.signatures) else None


class Prefetcher:
    """Follows the packs and unpacks of a session; called under the tiers' lock."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tapes: list[Tape] = []
        self._open: dict[int, Tape] = {}  # by thread
        self._asked: list[_Request] = []
        self._times: dict[_Place, int] = {}  # each was asked for
        self._recording = Recording([], [])
        self._walk: tuple[int, int] = (-1, -1)  # the backward and tape that the cursor belongs to
        self._cursor = 0
        # Passed by in a learned order, and perhaps not there when their turn comes: what may still
        # leave while a forward runs, and what has to be asked for before.
        self._staying: _Deferred = deque(maxlen=_MAX_DEFERRED)
        self._again: _Deferred = deque(maxlen=_MAX_DEFERRED)

    def begin_step(self) -> None:
        """The steps before this one are over: learn from them and forget their forwards."""
        if self._asked:
            self._recording = Recording(self._tapes, self._asked)
        self._tapes, self._open, self._asked = [], {}, []
        self._times.clear()
        self._staying.clear()
        self._again.clear()
        self._walk, self._cursor = (-1, -1), 0

    def saved(self, ticket: _Claim, node: int) -> None:
        """A ticket was handed to autograd by the operation with this number."""
        thread = threading.get_ident()
        tape = self._open.get(thread)
        if tape is None:
            if len(self._tapes) >= MAX_FORWARDS:  # one step around a whole training loop
                self.begin_step()
            number = len(self._tapes)
            tape = self._open[thread] = Tape(number, self._recording.signature(number))
            self._tapes.append(tape)
        tape.append(ticket, node)
        if tape.signature == tape.recorded and self._walk[1] == -1:  # this forward is complete
            self._look_again(self._staying)
            self._bring(self._recorded())

    def foresee(self) -> None:
        """Backward has come to a part that may ask for nothing: bring back what the next ones will,
        where the order is known.
        """
        if self._walk[1] == -1:
            self._bring(self._recorded())

    def asked(self, ticket: _Claim) -> None:
        """Backward wants this ticket now: bring back what it will want next."""
        tape = ticket.tape
        if not isinstance(tape, Tape):
            return  # of a bundle that has not left
        self._open.clear()  # what is saved from now on belongs to another forward
        rank = self._note(tape, ticket.ordinal)
        known = rank is not None
        if rank is None:
            rank = tape.rank(ticket.ordinal)
        walk = (torch._C._current_graph_task_id(), -1 if known else id(tape))
        if walk != self._walk or self._cursor <= rank:
            self._walk, self._cursor = walk, rank + 1
        if known and self._again:
            self._look_again(self._again)
        self._bring(self._recorded() if known else self._predicted(tape))

    def _note(self, tape: Tape, ordinal: int) -> int | None:
        """Record this request; its place in the learned order, ``None`` where none was learned."""
        place = (tape.number, ordinal)
        if tape.number >= len(self._tapes) or self._tapes[tape.number] is not tape:
            return None  # of an earlier step
        asked = self._asked
        if not asked or asked[-1][0] != place:  # else read twice by one operation
            times = self._times.get(place, 0)
            self._times[place] = times + 1
            asked.append((place, times))
        return self._recording.rank.get(asked[-1]) if tape.signature == tape.recorded else None

    def _bring(self, upcoming: Iterator[_Claim]) -> None:
        for ticket in upcoming:
            if not self._tiers.prefetch(ticket.block):
                self._cursor -= 1  # this one is looked at again
                return

    def _look_again(self, deferred: _Deferred) -> None:
        """Bring back what was passed by, as far as there is room."""
        for _ in range(len(deferred)):
            ref, request = deferred.popleft()
            ticket = ref()
            if ticket is None or self._times.get(request[0], 0) > request[1]:
                continue  # it was asked for meanwhile
            if not self._tiers.prefetch(ticket.block):
                deferred.append((ref, request))
                return
            self._defer_if_unsure(ticket, request)

    def _defer_if_unsure(self, ticket: _Claim, request: _Request) -> None:
        if self._times.get(request[0], 0) < request[1]:
            self._again.append((weakref.ref(ticket), request))
        elif ticket.block.state in (State.LIVE, State.OFFLOADING):
            self._staying.append((weakref.ref(ticket), request))

    def _predicted(self, tape: Tape) -> Iterator[_Claim]:
        """Tickets of one forward, in the order that follows from its nodes."""
        order = tape.order()
        end = min(len(order), self._cursor + _MAX_LOOKED_AT)
        while self._cursor < end:
            self._cursor += 1
            ticket = tape.ticket(order[self._cursor - 1])
            if ticket is not None:
                yield ticket

    def _recorded(self) -> Iterator[_Claim]:
        """Tickets in the order of the recorded step, up to a forward that is not complete."""
        order = self._recording.order
        end = min(len(order), self._cursor + _MAX_LOOKED_AT)
        while self._cursor < end:
            (number, ordinal), _ = request = order[self._cursor]
            if number >= len(self._tapes):
                return
            tape = self._tapes[number]
            if tape.signature != tape.recorded:
                if tape in self._open.values():
                    return
                self._cursor += 1
                continue
            self._cursor += 1
            ticket = tape.ticket(ordinal)
            if ticket is not None:
                yield ticket
                self._defer_if_unsure(ticket, request)  # not if it has found no room
