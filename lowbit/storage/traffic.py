"""What offloading has moved, and how much of the time that it took the caller has waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowbit import user_warnings
from lowbit.tables import aligned

__all__ = ["Traffic"]

#: The share of the time above which waiting is worth a warning, and the seconds after which there is enough to judge.
_TOO_MUCH, _ENOUGH = 0.1, 1.0
#: Pairs of CUDA events that wait to be read.
_EVENTS = 64


class Traffic:
    """Bytes moved away and back, seconds that the copies took, seconds that the caller waited for them.

    On CUDA the seconds are those of the streams. ``elapsed`` counts from the first move of a step to its last.
    """

    def __init__(self, place: str) -> None:
        self.place = place
        self.out_bytes = self.back_bytes = 0
        self.copying = self.waited = 0.0
        self._past, self._begun, self._last = 0.0, None, 0.0  # type: float, float | None, float
        self._events: list[tuple[str, Any, Any]] = []
        self._guard, self._warned = threading.RLock(), False

    @property
    def hidden(self) -> float:
        """Seconds of copying in which the caller went on."""
        self._read_events()
        return max(self.copying - self.waited, 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds between the beginning and the last move of each step, together."""
        return self._past + (0.0 if self._begun is None else self._last - self._begun)

    def begin(self) -> None:
        """A step begins."""
        self._past, self._begun = self.elapsed, time.perf_counter()
        self._last = self._begun

    def moved(self, out: int = 0, back: int = 0) -> None:
        """Count bytes of a copy that has been started."""
        with self._guard:
            self.out_bytes += out
            self.back_bytes += back

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """Count the seconds inside as ``"copying"`` or ``"waited"``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter()
            self._add(what, self._last - start)

    def events(self, what: str, start: Any, end: Any) -> None:
        """Count the seconds between two CUDA events, once they are known."""
        with self._guard:
            self._events.append((what, start, end))
            self._last = time.perf_counter()
        if len(self._events) > _EVENTS:
            self._read_events()

    def _read_events(self) -> None:
        with self._guard:
            pending, self._events = self._events, []
        for what, start, end in pending:
            end.synchronize()
            self._add(what, start.elapsed_time(end) / 1e3)

    def _add(self, what: str, seconds: float) -> None:
        with self._guard:
            setattr(self, what, getattr(self, what) + seconds)

    def judge(self) -> None:
        """Warn once where waiting takes more than a tenth of the time."""
        if not self._warned and self.elapsed > _ENOUGH and self.waited > _TOO_MUCH * self.elapsed:
            self._warned = True
            user_warnings.warn(
                f"offload to {self.place}: {self.waited / self.elapsed:.0%} of the time is spent waiting for copies, "
                f"which the computation is too short to hide; offload less (a larger min_bytes=), take a faster "
                f"place, or checkpoint instead"
            )

    def __str__(self) -> str:
        hidden = self.hidden
        seconds = max(self.copying, 1e-9)
        rows = [
            ("place", self.place),
            ("moved away", f"{self.out_bytes / 1e6:.1f} MB"),
            ("moved back", f"{self.back_bytes / 1e6:.1f} MB"),
            ("bandwidth", f"{(self.out_bytes + self.back_bytes) / seconds / 1e9:.2f} GB/s"),
            ("hidden", f"{hidden:.3f} s"),
            ("waited", f"{self.waited:.3f} s of {self.elapsed:.3f} s"),
        ]
        return aligned(rows)
