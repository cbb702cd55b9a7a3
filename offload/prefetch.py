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
"""

import threading
import weakref
from collections.abc import Iterator

import torch

from offload.block import Ticket
from offload.tiers import Tiers

MAX_FORWARDS = 256  # that one recording covers
_Place = tuple[int, int]  # number of the tape in the step, ordinal of the ticket on the tape


class Tape:
    """The tickets of one forward of one thread, as they were saved."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.signature = 0  # of the sizes saved so far
        self._nodes: list[int] = []
        self._tickets: list[weakref.ref[Ticket]] = []
        self._order: list[int] = []
        self._rank: list[int] = []

    def append(self, ticket: Ticket, node: int) -> None:
        """Add the newest ticket; ``node`` is the sequence number of the operation that saves it."""
        ticket.tape, ticket.ordinal = self, len(self._tickets)
        self._nodes.append(node)
        self._tickets.append(weakref.ref(ticket))
        self.signature = hash((self.signature, ticket.block.nbytes))

    def ticket(self, ordinal: int) -> Ticket | None:
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

    def __init__(self, tapes: list[Tape], asked: list[_Place]) -> None:
        self.signatures = [tape.signature for tape in tapes]
        self.order = list(
            dict.fromkeys(asked)
        )  # a second backward over a retained graph adds nothing
        self.rank = {place: rank for rank, place in enumerate(self.order)}

    def covers(self, tape: Tape) -> bool:
        """Whether this forward saves what the one with its number saved in the recorded step."""
        return tape.number < len(self.signatures) and self.signatures[tape.number] == tape.signature


class Prefetcher:
    """Follows the packs and unpacks of a session; called under the tiers' lock."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._tapes: list[Tape] = []
        self._open: dict[int, Tape] = {}  # by thread
        self._asked: list[_Place] = []
        self._recording = Recording([], [])
        self._walk: tuple[int, int] = (-1, -1)  # the backward and tape that the cursor belongs to
        self._cursor = 0

    def begin_step(self) -> None:
        """The steps before this one are over: learn from them and forget their forwards."""
        if self._asked:
            self._recording = Recording(self._tapes, self._asked)
        self._tapes, self._open, self._asked = [], {}, []

    def saved(self, ticket: Ticket, node: int | None = None) -> None:
        """A ticket was handed to autograd, by the operation with this number; ``None``: by the one
        that is being built.
        """
        thread = threading.get_ident()
        tape = self._open.get(thread)
        if tape is None:
            if len(self._tapes) >= MAX_FORWARDS:  # one step around a whole training loop
                self.begin_step()
            tape = self._open[thread] = Tape(len(self._tapes))
            self._tapes.append(tape)
        if node is None:
            # It has taken its number already: the last one given out.
            node = torch._C._autograd._get_sequence_nr() - 1
        tape.append(ticket, node)

    def asked(self, ticket: Ticket) -> None:
        """Backward wants this ticket now: bring back what it will want next."""
        tape = ticket.tape
        assert isinstance(tape, Tape)
        self._open.clear()  # what is saved from now on belongs to another forward
        if tape.number < len(self._tapes) and self._tapes[tape.number] is tape:
            self._asked.append((tape.number, ticket.ordinal))
        for upcoming in self._upcoming(tape, ticket.ordinal):
            if not self._tiers.prefetch(upcoming.block):
                self._cursor -= 1  # this one is looked at again
                return

    def _upcoming(self, tape: Tape, ordinal: int) -> Iterator[Ticket]:
        """Tickets in the order they will be asked for, from the first not yet looked at in this
        backward.
        """
        recorded = (
            self._recording.rank.get((tape.number, ordinal))
            if self._recording.covers(tape)
            else None
        )
        known = recorded is not None
        rank = recorded if recorded is not None else tape.rank(ordinal)
        walk = (torch._C._current_graph_task_id(), -1 if known else id(tape))
        if walk != self._walk or self._cursor <= rank:
            self._walk, self._cursor = walk, rank + 1
        places = self._recording.order if known else [(tape.number, i) for i in tape.order()]
        while self._cursor < len(places):
            number, i = places[self._cursor]
            self._cursor += 1
            ticket = self._ticket(number, i) if known else tape.ticket(i)
            if ticket is not None:
                yield ticket

    def _ticket(self, number: int, ordinal: int) -> Ticket | None:
        if number >= len(self._tapes) or not self._recording.covers(self._tapes[number]):
            return None
        return self._tapes[number].ticket(ordinal)
