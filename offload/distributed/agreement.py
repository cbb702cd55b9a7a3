"""Agreement: one decision for all ranks of a group, through the store by which they have met.

It is no collective of theirs: those are the model's, and one more in between would have to come at
the same place on every rank. The store is asked by name, and holds up nobody else.

[Note: decided once] Every rank says what it knows, under a key of its own, and waits for the
verdict. The first of them reads what all have said, decides, and proposes. The store takes the
first proposal, and that is the verdict for all. Whoever has waited too long, or leaves, proposes
that it is over: then nothing is decided any more, on any rank. So a rank never goes on with a
decision that another one has not, whatever becomes of either.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import nn

__all__ = ["Agreement", "agreement_on", "ranks_of"]

T = TypeVar("T")
PATIENCE_SECONDS = 120.0  # for the others; they may have to load data, or to compile
_SHORTEST_SECONDS, _LONGEST_SECONDS = 1e-4, 0.02  # between two looks

_opened: Counter[tuple[int, ...]] = Counter()  # agreements of this process, by their ranks


class Store(Protocol):
    """What is needed of a store of ``torch.distributed``."""

    def set(self, key: str, value: Any, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...

    def compare_set(self, key: str, expected: Any, desired: Any, /) -> object: ...

    def delete_key(self, key: str, /) -> object: ...


class Agreement:
    """See the module's text. Made on every rank, in the same order as other agreements of theirs.

    Args:
        store: that all of them reach.
        rank: this one.
        ranks: those that are to come.
        about: ranks that name the same decide together.
        patience_seconds: how long to wait for the others.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: Sequence[int],
        *,
        about: str,
        patience_seconds: float = PATIENCE_SECONDS,
    ) -> None:
        self.patience_seconds = patience_seconds
        self.over = ""  # why nothing is decided any more
        self._store, self._rank, self._ranks = store, rank, ranks
        self._members: list[int] = []
        self._about = zlib.crc32(about.encode())
        self._count = 0  # of decisions
        store.set(f"joined/{rank}", str(self._about))

    def decide(self, said: object, lead: Callable[[list[Any]], T]) -> T | None:
        """What ``lead`` makes of what all ranks have said, on every one of them; it runs on one.

        Returns:
            The same on all ranks; ``None`` when it is over, and ``over`` tells why.

        Raises:
            Exception: what ``lead`` raised, on every rank.
        """
        if self.over:
            return None
        try:
            verdict, value = self._verdict(said, lead)
        except BaseException:
            self.leave()
            raise
        self._count += 1
        if verdict == "over":
            self.over = value
            return None
        if verdict == "failed":
            raise value
        made: T = value
        return made

    def leave(self) -> None:
        """This rank takes no part any more. May be called twice."""
        if not self.over:
            self.over = "this rank has left"
            with contextlib.suppress(RuntimeError):  # the store may be gone, with the others
                self._propose("over", f"rank {self._rank} plans no more")

    # -- one decision -----------------------------------------------------------------------------

    def _verdict(self, said: object, lead: Callable[[list[Any]], Any]) -> tuple[str, Any]:
        self._store.set(self._key(self._rank), _packed(said))
        deadline = time.monotonic() + self.patience_seconds
        try:
            if (self._members or self._meet(deadline)) and self._rank == self._members[0]:
                self._lead(lead, deadline)
            self._wait(self._key("verdict"), deadline)
        except _AbsentError as e:
            self._propose("over", str(e))
        verdict: tuple[str, Any] = _unpacked(self._store.get(self._key("verdict")))
        return verdict

    def _meet(self, deadline: float) -> bool:
        """Who decides together; False: it is over already."""
        about = []
        for rank in self._ranks:
            if not self._wait(f"joined/{rank}", deadline, rank):
                return False
            about.append(int(self._store.get(f"joined/{rank}")))
        both = zip(self._ranks, about, strict=True)
        self._members = [rank for rank, its in both if its == self._about]
        return True

    def _lead(self, lead: Callable[[list[Any]], Any], deadline: float) -> None:
        keys = [self._key(rank) for rank in self._members]
        for rank, key in zip(self._members, keys, strict=True):
            if not self._wait(key, deadline, rank):
                return
        self._forget(self._count - 1)  # they all have read it
        try:
            made = lead([_unpacked(self._store.get(key)) for key in keys])
        except Exception as e:  # all are to raise it
            self._propose("failed", e)
        else:
            self._propose("decided", made)

    def _propose(self, verdict: str, value: object) -> None:
        """See Note: decided once."""
        self._store.compare_set(self._key("verdict"), "", _packed((verdict, value)))

    def _wait(self, key: str, deadline: float, rank: int | None = None) -> bool:
        """Until ``key``, which ``rank`` sets, is there; False: a verdict was there before it."""
        pause = _SHORTEST_SECONDS
        while not self._store.check([key]):
            if self._store.check([self._key("verdict")]):
                return False
            if time.monotonic() > deadline:
                who = "another rank" if rank is None else f"rank {rank}"
                raise _AbsentError(f"{who} has not come within {self.patience_seconds:.0f} s")
            time.sleep(pause)  # and not in the store, which nobody else could ask meanwhile
            pause = min(_LONGEST_SECONDS, 1.5 * pause)
        return True

    def _key(self, name: object) -> str:
        return f"{self._about}/{self._count}/{name}"

    def _forget(self, number: int) -> None:
        for name in [*self._members, "verdict"] if number >= 0 else []:
            with contextlib.suppress(RuntimeError):  # not every store can
                self._store.delete_key(f"{self._about}/{number}/{name}")


class _AbsentError(Exception):
    """A rank that did not come."""


def _packed(value: object) -> Any:
    return zlib.compress(pickle.dumps(value), 1)


def _unpacked(text: Any) -> Any:
    return pickle.loads(zlib.decompress(text))


def agreement_on(model: nn.Module, about: str) -> Agreement | None:
    """Of the ranks that share ``model``, and what they name the same; ``None``: there is one."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    ranks, rank = ranks_of(model), dist.get_rank()
    if len(ranks) == 1 or rank not in ranks:
        return None
    _opened[ranks] += 1
    group = "-".join(map(str, ranks)) if len(ranks) < dist.get_world_size() else "all"
    name = f"offload/agreement/{group}/{_opened[ranks]}"
    store = dist.distributed_c10d._get_default_store()
    return Agreement(dist.distributed_c10d.PrefixStore(name, store), rank, ranks, about=about)


def ranks_of(model: nn.Module) -> tuple[int, ...]:
    """Those over which ``model`` is spread, as far as its parameters (DTensor) and modules (DDP,
    FSDP) tell; else all.
    """
    found: set[int] = set()
    for parameter in model.parameters():
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            found.update(mesh.mesh.flatten().tolist())
    for module in model.modules():
        group = getattr(module, "process_group", None)
        if isinstance(group, dist.ProcessGroup):
            found.update(dist.get_process_group_ranks(group))
    return tuple(sorted(found)) if found else tuple(range(dist.get_world_size()))
