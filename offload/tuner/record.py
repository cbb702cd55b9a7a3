"""What one plain step saves and asks for again, and when: the input of the replay.

The step runs with hooks that keep everything where it is. Which tensors may leave is not decided
here: a session, whose policy keeps them all, is asked.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, NamedTuple

import attrs
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from offload.blocks.placement import Placement, SavedTensor
from offload.blocks.registry import Base, Key, key_of
from offload.config import Config
from offload.session import Session
from offload.tensors.live import hooks_below, is_parameter_like, storage_of
from offload.tuner.stopwatch import Stopwatch

__all__ = [
    "Beyond",
    "BlockRecord",
    "StepRecord",
    "Touch",
    "record_step",
    "with_releases",
]


class BlockRecord(NamedTuple):
    """One storage that was saved."""

    nbytes: int
    movable: bool  # a session may take it, if it is large enough
    held: bool  # somebody else kept it until the step's end: to move it frees nothing


class Touch(NamedTuple):
    """A save, or a use of what a save gave, in the order they happened."""

    at_ns: int  # what the device had computed by then, from the step's start
    host_ns: int  # when the host asked
    block: int
    save: int  # its number; a use names the save that it belongs to
    is_use: bool


class Beyond(NamedTuple):
    """Device memory beyond saved storages that are alive, over that at the step's start: of
    operators' temporaries, gradients, results that are about to be saved.
    """

    before_bytes: int  # at most, since the touch before
    after_bytes: int  # just after the touch


@dataclass(frozen=True)
class StepRecord:
    """A plain step. Times in nanoseconds from its start.

    ``beyond`` has an entry for each touch and one for the rest of the step; it is empty on the CPU,
    where nobody counts what is not saved. ``released`` tells for each block how many touches there
    had been when nobody but autograd held it any more, so that to move it would have freed it; it
    is empty where that is not known.
    """

    blocks: tuple[BlockRecord, ...]
    touches: tuple[Touch, ...]
    end_ns: int
    beyond: tuple[Beyond, ...] = ()
    released: tuple[int, ...] = ()

    @property
    def movable_bytes(self) -> int:
        """Of all storages that could leave."""
        return sum(b.nbytes for b in self.blocks if b.movable and not b.held)


class _Mark(NamedTuple):
    mark: object
    host_ns: int
    block: int
    save: int
    is_use: bool


class _Recorder:
    """A pair of hooks inside a session's: passes everything on and takes notes."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._lock = threading.Lock()
        self._asked = threading.local()  # .about: whether the session asked its policy just now
        self._keys: dict[Key, int] = {}  # block
        self._bases: list[Base] = []  # of the keys
        self._storages: list[StorageWeakRef] = []  # also keep the addresses from being used again
        self._sizes: list[int] = []
        self._movable: list[bool] = []
        self._marks: list[_Mark] = []
        self._memory: list[tuple[int, int] | None] = []
        self._saves = 0

    def policy(self, tensor: SavedTensor) -> Placement:
        """Keeps everything; being asked means that the tensor could leave."""
        self._asked.about = True
        return Placement.KEEP

    def hooks(self) -> saved_tensors_hooks:
        """To be entered inside the session's step."""
        below_pack, below_unpack = hooks_below()

        @wraps(below_pack)
        def pack(tensor: Tensor) -> Any:
            self._asked.about = False
            packed = below_pack(tensor)
            return self._saved(tensor, movable=self._asked.about), packed

        def unpack(taken: Any) -> Tensor:
            save, packed = taken
            tensor: Tensor = below_unpack(packed)
            if save is not None:
                with self._lock:
                    self._note(*save, is_use=True)
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def _saved(self, tensor: Tensor, *, movable: bool) -> tuple[int, int] | None:
        storage = _saved_by_forward(tensor)
        if storage is None:
            return None
        key, base = key_of(tensor, storage, storage.nbytes())
        with self._lock:
            block = self._keys.get(key)
            if block is None:
                block = self._keys[key] = len(self._sizes)
                self._bases.append(base)
                self._storages.append(StorageWeakRef(storage))  # type: ignore[no-untyped-call]
                self._sizes.append(storage.nbytes())
                self._movable.append(movable)
            self._movable[block] = self._movable[block] or movable
            save, self._saves = self._saves, self._saves + 1
            self._note(block, save, is_use=False)
        return block, save

    def _note(self, block: int, save: int, *, is_use: bool) -> None:
        mark = _Mark(self._stopwatch.mark(), self._stopwatch.host_ns(), block, save, is_use)
        self._marks.append(mark)
        self._memory.append(self._stopwatch.memory_bytes())

    def record(self) -> StepRecord:
        """What was noted."""
        end_ns = self._stopwatch.end_ns()
        memory = [*self._memory, self._stopwatch.memory_bytes()]
        held = [not ref.expired() for ref in self._storages]  # type: ignore[no-untyped-call]
        blocks = tuple(map(BlockRecord, self._sizes, self._movable, held))
        touches = tuple(
            Touch(self._stopwatch.when_ns(m.mark), m.host_ns, m.block, m.save, m.is_use)
            for m in self._marks
        )
        beyond = tuple(
            Beyond(entry[0] - before, entry[1] - after)
            for entry, (before, after) in zip(memory, live_bytes(blocks, touches), strict=True)
            if entry is not None
        )
        return StepRecord(blocks, touches, end_ns, beyond)


def _saved_by_forward(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of what is saved; none of a parameter, or of what backward itself saves."""
    if is_parameter_like(tensor) or torch._C._current_graph_task_id() != -1:
        return None
    return storage_of(tensor)


def live_bytes(
    blocks: Sequence[BlockRecord], touches: Sequence[Touch]
) -> Iterator[tuple[int, int]]:
    """Bytes of saved storages alive before and after each touch, and at the step's end, where
    nothing moves. A storage lives from its first save until the touch after its last use.

    Example:
        >>> save, use = Touch(0, 0, 0, 0, False), Touch(1, 1, 0, 0, True)
        >>> list(live_bytes([BlockRecord(64, True, False)], [save, use]))
        [(0, 64), (64, 64), (0, 0)]
    """
    uses_left = Counter(t.block for t in touches if t.is_use)
    alive_bytes, known, dying = 0, set(), 0
    for touch in touches:
        alive_bytes, dying = alive_bytes - dying, 0
        before_bytes, nbytes = alive_bytes, blocks[touch.block].nbytes
        if touch.is_use:
            uses_left[touch.block] -= 1
            last = not uses_left[touch.block] and not blocks[touch.block].held
            dying = nbytes if last else 0
        elif touch.block not in known:
            known.add(touch.block)
            alive_bytes += nbytes
        yield before_bytes, alive_bytes
    yield alive_bytes - dying, alive_bytes - dying


def record_step(step: Callable[[], object], config: Config, stopwatch: Stopwatch) -> StepRecord:
    """Run ``step`` once, plain, and note what it saves and asks for.

    Args:
        step: one forward and backward.
        config: whose device's tensors could leave.
        stopwatch: tells when.
    """
    recorder = _Recorder(stopwatch)
    everything = attrs.evolve(config, min_offload_bytes=1, bundle_bytes=0)
    with Session(everything, policy=recorder.policy) as session:
        stopwatch.begin()
        with session.step(), recorder.hooks():
            result = step()
        record = recorder.record()
        del result
    return record


def with_releases(record: StepRecord, step: Callable[[], object], config: Config) -> StepRecord:
    """``record`` with what ``released`` tells, of a step that really moves everything at once.

    On the CPU only: on an accelerator a storage is also held until its copy was seen to be done.
    A step that saves something else than the recorded one leaves the record as it was.
    """
    sizes: list[int] = []
    touches = 0
    deaths: dict[int, int] = {}
    watches: list[weakref.ref[torch.UntypedStorage]] = []

    def hooks() -> saved_tensors_hooks:
        below_pack, below_unpack = hooks_below()
        known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

        @wraps(below_pack)
        def pack(tensor: Tensor) -> Any:
            nonlocal touches
            storage = _saved_by_forward(tensor)
            if storage is None:
                return below_pack(tensor)
            key = storage._cdata
            if key not in known or known[key]() is None:
                block = len(sizes)
                sizes.append(storage.nbytes())

                def died(_: object) -> None:
                    deaths.setdefault(block, touches)

                known[key] = weakref.ref(storage, died)
                watches.append(known[key])
            touches += 1
            return below_pack(tensor)

        return saved_tensors_hooks(pack, below_unpack)

    at_once = attrs.evolve(config, min_offload_bytes=1, bundle_bytes=0, keep_last_bytes=0)
    with Session(at_once) as session, session.step(), hooks():
        result = step()
        del result
    if sizes != [b.nbytes for b in record.blocks]:
        return record
    never = len(record.touches)
    return replace(record, released=tuple(deaths.get(i, never) for i in range(len(sizes))))
