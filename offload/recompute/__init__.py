"""Recompute: activations are given up in forward and computed again when backward asks.

    checkpoint.py   one region: torch's non-reentrant checkpoint, whose inputs may be anything
    regions.py      what a region calls, and the inputs from which it calls it again
    statistics.py   what a recomputation must not count twice
    sequential.py   a chain of functions in checkpointed segments
    schedule.py     where a chain is cut, what that costs and what it holds
    selective.py    regions of which only the cheap operations are computed again
    cells.py        the results of the others
    modes.py        what sees the operations of a region
    rules.py        which modules of a model are recomputed, selective, or offloaded
    caches.py       caches of keys and values, that must not be filled twice
    selectors.py    how a rule says which
    verify.py       whether what is recomputed is what the forward had
    drift.py        how far it is from that
    callers.py      in which modules an operation runs

Nothing here knows of sessions: inputs meet whatever saved-tensor hooks are active.
"""

from offload.recompute.checkpoint import checkpoint
from offload.recompute.drift import ModuleDrift, RecomputeReport
from offload.recompute.rules import Action, Applied
from offload.recompute.schedule import Schedule
from offload.recompute.selective import selective
from offload.recompute.selectors import every
from offload.recompute.sequential import checkpoint_sequential
from offload.recompute.verify import Verifier

__all__ = [
    "Action",
    "Applied",
    "ModuleDrift",
    "RecomputeReport",
    "Schedule",
    "Verifier",
    "checkpoint",
    "checkpoint_sequential",
    "every",
    "selective",
]
