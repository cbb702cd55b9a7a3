"""Recompute: activations are given up in forward and computed again when backward asks.

checkpoint.py   one region: torch's non-reentrant checkpoint, whose inputs may be anything
regions.py      what a region calls, and the inputs from which it calls it again

Nothing here knows of sessions: inputs meet whatever saved-tensor hooks are active.
"""

from offload.recompute.checkpoint import checkpoint

__all__ = ["checkpoint"]
