"""SIGINT and SIGTERM in training loops: a run finishes its step and saves before it ends."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["Interrupted", "stop_on_signals"]


class Interrupted(Exception):
    """A signal ended the run after ``step`` steps, which are saved in ``path``."""

    def __init__(self, step: int, path: Path) -> None:
        super().__init__(f"stopped after step {step}; saved in {path}")
        self.step, self.path = step, path


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], bool]]:
    """Context in which SIGINT and SIGTERM make the yielded function return True; a second signal ends the process."""
    stopped = False
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    def note(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: stopped
    finally:
        restore()
