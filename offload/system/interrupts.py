"""Interrupts (Ctrl-C) that are neither lost nor come where they would do harm."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["interrupts_deferred", "interrupts_kept", "stop_if_interrupted"]

_interrupted = threading.Event()


@contextlib.contextmanager
def interrupts_kept() -> Iterator[None]:
    """Inside, ``stop_if_interrupted`` raises what Python may have dropped: after a long call of C++
    the first code to run is often the callback of a weak reference, whose exceptions are ignored.
    """

    def interrupt(number: int, frame: object) -> None:
        _interrupted.set()
        raise KeyboardInterrupt

    def ignored(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            hook(what)

    hook = sys.unraisablehook
    is_main = threading.current_thread() is threading.main_thread()
    mine = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    _interrupted.clear()
    if mine:
        signal.signal(signal.SIGINT, interrupt)
        sys.unraisablehook = ignored
    try:
        yield
    finally:
        if mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.unraisablehook = hook


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """An interrupt that comes inside is raised at the end, so that what is made is also held."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            before(*came[0])


def stop_if_interrupted() -> None:
    """Called where a command gets on, step by step.

    Raises:
        KeyboardInterrupt: the user has asked for it.
    """
    if _interrupted.is_set():
        raise KeyboardInterrupt
