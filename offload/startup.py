"""An interrupt while a command is still starting, of which torch alone takes seconds.

Nothing has been opened by then, so that it may end at once, and without a traceback of imports.
"""

import os
import signal
import sys
import threading
from typing import NoReturn

__all__ = ["begin", "end"]


def begin() -> None:
    """From now on an interrupt ends the process, if it runs the command ``offload``."""
    if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)


def end() -> None:
    """From now on it is an exception again."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    by_name = os.path.basename((sys.argv or [""])[0]) == "offload"
    as_module = ("-m", "offload") in zip(sys.orig_argv, sys.orig_argv[1:], strict=False)
    return (by_name or as_module) and threading.current_thread() is threading.main_thread()


def _leave(number: int, frame: object) -> NoReturn:
    os.write(2, b"Interrupted.\n")
    os._exit(130)
