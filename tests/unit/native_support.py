"""What the tests of the native engine's types share."""

import os
import signal
import warnings

import torch


def random_bytes(nbytes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def in_child(body):
    """Run `body` in a forked child; return its exit status, 1 if it raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads are alive: that is the point
        pid = os.fork()
    if pid == 0:
        signal.alarm(30)  # a child that hangs is a failure, not a wait
        status = 1
        try:
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
