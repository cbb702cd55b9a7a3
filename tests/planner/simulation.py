"""An event simulation of the runtime: links that carry pieces one after the other, real accounting.

It shares nothing with the recurrence that it checks. Segments run one after the other; what leaves
does so in pieces, first in, first out; what comes back does so in the order of backward, as early
as the reserve rule allows. Memory is counted piece by piece at every moment.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from offload.planner.model import Chain, Option

PIECES = 16
_SLACK = 1e-9


@dataclass
class Piece:
    """Some of the bytes of a segment, and the places that hold them."""

    segment: int
    nbytes: float
    to_disk: bool
    device: bool = False
    host: bool = False
    disk: bool = False
    saved: bool = False  # has left the device once
    stays: bool = False  # in host memory, as it is about to be wanted
    dead: bool = False


@dataclass(frozen=True)
class Run:
    """What happened."""

    seconds: float
    peak_device_bytes: float
    peak_host_bytes: float
    over_budget: bool
    stuck: bool


@dataclass
class Link:
    """Carries one piece at a time."""

    bytes_per_s: float
    piece: Piece | None = None
    finish: float = math.inf
    queue: deque[Piece] = field(default_factory=deque)

    def start(self, piece: Piece, now: float) -> None:
        self.piece, self.finish = piece, now + piece.nbytes / self.bytes_per_s


class Simulation:
    """One step of one plan."""

    def __init__(self, chain: Chain, choice: Sequence[int]) -> None:
        self.chain = chain
        self.options: list[Option] = chain.options(choice)
        self.resident = [0.0]
        for i, o in enumerate(self.options):
            held = sum(
                shared.nbytes
                for k, s in enumerate(chain.segments)
                for shared in s.shared
                if k - shared.back == i and o.holds_output and self.options[k].frees_input
            )
            self.resident.append(self.resident[-1] + o.resident_bytes + held)
        self.pieces = [
            [Piece(i, o.offload_bytes / PIECES, o.disk_bytes > 0) for _ in range(PIECES)]
            if o.offload_bytes
            else []
            for i, o in enumerate(self.options)
        ]
        self.out, self.back = Link(chain.out_rate), Link(chain.back_rate)
        self.write, self.read = Link(chain.write_rate), Link(chain.read_rate)
        self.wanted: deque[Piece] = deque()  # to come back, in the order of backward
        self.to_read: deque[Piece] = deque()
        self.now = self.peak_device = self.peak_host = 0.0
        self.at: int | None = None  # the segment whose backward runs or is next
        self.use = 0.0  # of the segment that runs, beside pieces of others
        self.stuck = False

    # -- memory -----------------------------------------------------------------------------------

    def present(self, before: int) -> float:
        """Bytes of pieces on the device that belong to segments before this one."""
        return sum(p.nbytes for ps in self.pieces[:before] for p in ps if p.device)

    @property
    def host_used(self) -> float:
        return sum(p.nbytes for ps in self.pieces for p in ps if p.host)

    def need(self, i: int) -> float:
        """Of the backward of ``i``, beside the pieces of those before it."""
        s = self.chain.segments[i]
        return self.resident[i] + s.saved_bytes + s.backward_bytes

    def has_reserve(self, segment: int, nbytes: float) -> bool:
        """The reserve rule: so many more bytes for this segment leave enough for all before it."""
        assert self.at is not None
        return all(
            self.need(k) + self.present(k) + nbytes <= self.chain.device_bytes + _SLACK
            for k in range(self.at, segment, -1)
        )

    def note(self) -> None:
        """Peaks, as they are now."""
        runs = self.use + sum(
            p.nbytes for ps in self.pieces for p in ps if p.device and p.segment != self.running
        )
        self.peak_device = max(self.peak_device, runs)
        self.peak_host = max(self.peak_host, self.host_used)

    running: int = -1

    # -- links ------------------------------------------------------------------------------------

    def start_links(self) -> None:
        limit = self.chain.host_bytes + _SLACK
        while self.out.queue and not self.out.queue[0].device:
            self.out.queue.popleft()
        if self.out.piece is None and self.out.queue:
            piece = self.out.queue[0]
            if not piece.saved and self.host_used + piece.nbytes <= limit:
                piece.host = True
                self.out.queue.popleft()
                self.out.start(piece, self.now)
        if self.write.piece is None and self.write.queue:
            self.write.start(self.write.queue.popleft(), self.now)
        if self.at is None:
            return
        self._start_read(limit)
        self._start_back()

    def _start_read(self, limit: float) -> None:
        while self.to_read and (self.to_read[0].dead or self.to_read[0].device):
            self.to_read.popleft().stays = True  # in host memory, should it still leave
        if self.read.piece is None and self.to_read:
            piece = self.to_read[0]
            if piece.host:
                piece.stays = True
                self.to_read.popleft()
            elif piece.disk and self.host_used + piece.nbytes <= limit:
                piece.host = True
                self.to_read.popleft()
                self.read.start(piece, self.now)

    def _start_back(self) -> None:
        while self.wanted:
            piece = self.wanted[0]
            if piece.dead:
                self.wanted.popleft()
            elif piece.device:
                # It has not left: it need not, if that leaves enough for those in between.
                if piece is self.out.piece or not self.has_reserve(piece.segment, 0.0):
                    return
                if piece in self.out.queue:
                    self.out.queue.remove(piece)
                self.wanted.popleft()
            else:
                ready = piece.host and piece is not self.read.piece and piece is not self.out.piece
                if self.back.piece is not None or not ready:
                    return
                if not self.has_reserve(piece.segment, piece.nbytes):
                    return
                piece.device = True
                self.wanted.popleft()
                self.back.start(piece, self.now)

    def complete(self, link: Link) -> None:
        piece = link.piece
        assert piece is not None
        link.piece, link.finish = None, math.inf
        if link is self.out:
            piece.device = False
            piece.saved = True
            if piece.dead:
                piece.host = False
            elif piece.to_disk and not piece.stays:
                self.write.queue.append(piece)
        elif link is self.write:
            piece.disk = True
            piece.host = piece.stays and not piece.dead
        elif piece.dead:
            piece.host = False

    def advance(self, until: float) -> bool:
        """Let the links work until then, or their next completion; whether there was one."""
        self.start_links()
        self.note()
        link = min((self.out, self.back, self.write, self.read), key=lambda each: each.finish)
        if link.piece is None or link.finish > until:
            self.now = max(self.now, until) if math.isfinite(until) else self.now
            return False
        self.now = max(self.now, link.finish)
        self.complete(link)
        return True

    # -- the step ---------------------------------------------------------------------------------

    def run(self) -> Run:
        for i in range(len(self.options)):
            self.forward(i)
        self.wanted = deque(p for ps in reversed(self.pieces) for p in reversed(ps))
        self.to_read = deque(p for p in self.wanted if p.to_disk)
        for i in reversed(range(len(self.options))):
            self.backward(i)
        over = self.peak_device > self.chain.device_bytes * (1 + 1e-6)
        over |= self.peak_host > self.chain.host_bytes * (1 + 1e-6)
        return Run(self.now, self.peak_device, self.peak_host, over, self.stuck)

    def forward(self, i: int) -> None:
        s, o = self.chain.segments[i], self.options[i]
        own = self.resident[i] + o.present_bytes + s.forward_bytes
        for back, nbytes in s.lingering:
            earlier = self.options[i - back]
            own += 0.0 if earlier.holds_output and not earlier.offload_bytes else nbytes
        while own + self.present(i) > self.chain.device_bytes + _SLACK and not self.stuck:
            self.use, self.running = self.resident[i], -1
            self.stuck = not self.advance(math.inf)
        self.use, self.running = own, i
        end = self.now + s.forward_seconds + o.forward_seconds
        while self.advance(end):
            pass
        for piece in self.pieces[i]:
            piece.device = True
            self.out.queue.append(piece)
        self.use, self.running = self.resident[i + 1], -1

    def backward(self, i: int) -> None:
        s, o = self.chain.segments[i], self.options[i]
        self.at = i
        self.use, self.running = self.resident[i], -1
        while not self.stuck:
            self.start_links()
            arrived = all(p.device and p is not self.back.piece for p in self.pieces[i])
            if arrived and self.need(i) + self.present(i) <= self.chain.device_bytes + _SLACK:
                break
            self.stuck = not self.advance(math.inf)
        self.use, self.running = self.need(i), i
        end = self.now + s.backward_seconds + o.backward_seconds
        while self.advance(end):
            pass
        for piece in self.pieces[i]:
            piece.device = piece.host = piece.disk = False
            piece.dead = True
        for link in (self.out, self.write):
            link.queue = deque(p for p in link.queue if not p.dead)


def simulate(chain: Chain, choice: Sequence[int]) -> Run:
    """Run a plan."""
    return Simulation(chain, choice).run()
