"""Options that newer versions of torch's checkpoint have are given where they are known."""

import subprocess
import sys

STAND_IN = """
import functools, torch
import torch.utils.checkpoint as module
given = []
plain = module.checkpoint

def checkpoint(function, *args, use_reentrant=None, context_fn=module.noop_context_fn,
               determinism_check="default", debug=False, early_stop=True,
               respect_saved_tensors_hooks=None, **kwargs):
    # The signature of torch 2.14.
    given.append(respect_saved_tensors_hooks)
    return plain(function, *args, use_reentrant=use_reentrant, context_fn=context_fn,
                 determinism_check=determinism_check, debug=debug, early_stop=early_stop, **kwargs)

if {newer}:
    module.checkpoint = checkpoint
import offload
x = torch.ones(3, requires_grad=True)
offload.checkpoint(lambda h: h.sin().exp(), x).sum().backward()
offload.checkpoint_sequential([torch.sin, torch.exp, torch.cos], 3, x).sum().backward()
print(given, x.grad is not None)
"""


def run(newer: bool) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", STAND_IN.replace("{newer}", str(newer))],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_kept_results_go_through_the_hooks() -> None:
    """What a policy of torch's own keeps would otherwise stay in memory, with a warning."""
    assert run(newer=True) == "[True, True, True] True"
    assert run(newer=False) == "[] True"
