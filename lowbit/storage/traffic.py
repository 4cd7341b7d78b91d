"""Statistics of offloading: bytes moved, seconds of copying, and seconds that the caller waited."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lowbit import user_warnings
from lowbit.tables import aligned

__all__ = ["Traffic"]

#: Fraction of the time above which waiting causes a warning, and the seconds that must have elapsed before.
_WARN_FRACTION, _WARN_SECONDS = 0.1, 1.0
#: Maximum number of CUDA event pairs before they are read.
_EVENTS = 64


class Traffic:
    """Bytes offloaded and loaded, seconds of copying, and seconds that the caller waited for copies.

    On CUDA, seconds are measured on the streams.

    Attributes:
        place: ``"cpu"`` or the directory.
        out_bytes: Bytes offloaded.
        back_bytes: Bytes loaded again.
        copying: Seconds of copying.
        waited: Seconds that the caller waited.
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
        """Seconds of copying that overlapped with computation."""
        self._read_events()
        return max(self.copying - self.waited, 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds from the beginning of a step to its last move, summed over steps."""
        return self._past + (0.0 if self._begun is None else self._last - self._begun)

    def begin(self) -> None:
        """Note the beginning of a step."""
        self._past, self._begun = self.elapsed, time.perf_counter()
        self._last = self._begun

    def moved(self, out: int = 0, back: int = 0) -> None:
        """Count the bytes of a copy that has been started."""
        with self._guard:
            self.out_bytes += out
            self.back_bytes += back

    @contextmanager
    def timed(self, counter: str) -> Iterator[None]:
        """Count the seconds inside as ``"copying"`` or ``"waited"``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._last = time.perf_counter()
            self._add(counter, self._last - start)

    def events(self, counter: str, start: Any, end: Any) -> None:
        """Count the seconds between two CUDA events, which are read later."""
        with self._guard:
            self._events.append((counter, start, end))
            self._last = time.perf_counter()
        if len(self._events) > _EVENTS:
            self._read_events()

    def _read_events(self) -> None:
        with self._guard:
            pending, self._events = self._events, []
        for counter, start, end in pending:
            end.synchronize()
            self._add(counter, start.elapsed_time(end) / 1e3)

    def _add(self, counter: str, seconds: float) -> None:
        with self._guard:
            setattr(self, counter, getattr(self, counter) + seconds)

    def judge(self) -> None:
        """Warn once if waiting takes more than a tenth of the time."""
        if not self._warned and self.elapsed > _WARN_SECONDS and self.waited > _WARN_FRACTION * self.elapsed:
            self._warned = True
            user_warnings.warn(
                f"offload to {self.place}: {self.waited / self.elapsed:.0%} of the time is spent waiting for copies, "
                f"because the computation is too short to hide them; offload less (a larger min_bytes=), use a faster "
                f"target, or use checkpointing instead"
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
