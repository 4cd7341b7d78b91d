"""Ctrl-C where Python would lose it: in ``__del__`` and in what is called when an object goes."""

from __future__ import annotations

import _thread
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

__all__ = ["keep_interrupts", "uninterrupted"]

#: Seconds from an interrupt that would be lost to the next try to raise it.
_SOON = 0.01


def uninterrupted(work: Callable[[], object]) -> None:
    """Call ``work`` to its end. A Ctrl-C meanwhile starts it again, and is raised soon after, outside of here."""
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
    """From now on an interrupt that Python would print and forget is raised again, soon after."""
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
    time.sleep(_SOON)
    _thread.interrupt_main()
