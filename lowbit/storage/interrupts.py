"""Ctrl-C during ``__del__`` and finalizers, which Python would lose."""

from __future__ import annotations

import _thread
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["keep_interrupts", "uninterrupted"]

#: Seconds until an interrupt that would be lost is raised again.
_DELAY = 0.01


def uninterrupted(work: Callable[[], object]) -> None:
    """Run ``work`` to its end. A Ctrl-C starts it again, and is raised soon after this function has returned."""
    interrupted = False
    while True:
        try:
            work()
            break
        except KeyboardInterrupt:
            interrupted = True
    if interrupted:
        _again()


@functools.cache
def keep_interrupts() -> None:
    """From now on, raise interrupts again that Python would print and ignore."""
    before = sys.unraisablehook

    def hook(lost: Any) -> None:
        if lost.exc_type is KeyboardInterrupt:
            _again()
        else:
            before(lost)

    sys.unraisablehook = hook


def _again() -> None:
    """Interrupt the main thread once it has left the code that must not raise."""
    _thread.start_new_thread(_interrupt, ())  # a threading.Thread takes locks, which this thread may hold


def _interrupt() -> None:
    time.sleep(_DELAY)
    _thread.interrupt_main()
