"""Activation offloading for PyTorch: saved activations wait for backward on disk, not in memory.

    with offload.Session(disk_dir="/nvme/scratch") as session:
        for batch in loader:
            with session.step():
                loss = model(batch)
                loss.backward()
            optimizer.step()
        print(session.report())

Glossary: a *saved tensor* is what autograd keeps for backward; a *block* is the bytes of one
storage; a *tier* is where bytes may live (device, host, disk); to *spill* is to write a block to
disk and to *fetch* is to read it back; the *arena* is the host memory through which blocks pass, a
*slot* one region of it; an *extent* is a region of the scratch file.
"""

import torch._dynamo

from offload.blocks.placement import Placement, SavedTensor
from offload.config import Config
from offload.errors import OffloadError, StorageError
from offload.planner.plan import Plan
from offload.planning import plan
from offload.profiler import profile
from offload.recompute import checkpoint, checkpoint_sequential, selective
from offload.report import StepReport
from offload.session import Session
from offload.tuner import tune

# When a step is entered inside compiled code, dynamo must run our functions, not trace into them.
torch._dynamo.trace_rules.add(__name__)

__version__ = "0.1.0"

__all__ = [
    "Config",
    "OffloadError",
    "Placement",
    "Plan",
    "SavedTensor",
    "Session",
    "StepReport",
    "StorageError",
    "checkpoint",
    "checkpoint_sequential",
    "profile",
    "plan",
    "selective",
    "tune",
]
