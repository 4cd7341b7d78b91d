"""Time of an op on this machine: the op is run once on synthetic tensors of its shapes, and the time is cached in a
file.

Between runs a large buffer is read, because in a step other ops evict an op's tensors from the caches. Its instructions
stay in the caches, since a step has few different ops. So a short op is run on other tensors just before.

Source: the operator benchmarks of torch.distributed._tools.runtime_estimator, which time every call of a step.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowbit.memory.cost import rates
from lowbit.memory.runnable import FAILURES, MOST, Call, CallCache, directory, prepared, setting, shorter, within

__all__ = ["Timings", "timings"]

#: Bytes of the buffer that is read between runs.
_FLUSH = 48 << 20
#: A call is run ``_RUNS`` times. A call below ``_SHORT`` seconds is run ``_MORE`` times more, each after a call on
#: other tensors. The minimum counts: disturbances only add time, and a median of few runs is not robust against them.
_RUNS, _MORE, _SHORT = 3, 4, 1e-3
#: Seconds. A call that would take longer is timed on smaller tensors. If these take twice as long, one run is enough.
_LONG = 0.05
#: Sizes are cut to no less: the time of an op is proportional to its work only from there on.
_LEAST = 128


class Timings:
    """Seconds of calls on ``device``, cached in the file ``path``."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self.device, self.path = device, path
        self._known: dict[Call, float | None] = {}
        self._cache = CallCache(path, float)
        self._flush: Tensor | None = None

    def seconds(self, call: Call) -> float | None:
        """Return the duration of the call, or None if it cannot be run on synthetic tensors."""
        if call not in self._known:
            value = self._cache.get(call)
            if value is None:
                value = self._measured(call)
                if value is not None:
                    self._cache.put(call, value)
            self._known[call] = value
        return self._known[call]

    def save(self) -> None:
        """Write new values to the file, and free the buffer that is read between runs."""
        self._flush = None
        self._cache.save()

    def _measured(self, call: Call) -> float | None:
        part, share = within(call, MOST)
        at = rates(self.device)
        part, ratio, _ = shorter(part, lambda work: max(work.seconds(at) / _LONG, work.bytes / MOST), _LEAST)
        if part.bytes > MOST:
            return None
        try:
            with torch.no_grad(), torch.random.fork_rng(self._devices()):
                run = prepared(part, self.device)
                seconds = self._least(run, 1)
                if seconds < _SHORT:
                    seconds = self._least(run, _MORE, before=prepared(part, self.device))
                elif seconds < 2 * _LONG:
                    seconds = min(seconds, self._least(run, _RUNS - 1))
        except FAILURES:
            return None
        return seconds * share * ratio

    def _least(self, run: Callable[[], object], runs: int, before: Callable[[], object] = lambda: None) -> float:
        """Return the seconds of the fastest run. Before each, the caches are flushed and ``before`` is called."""
        durations = []
        for _ in range(runs):
            self._empty_caches()
            before()
            self._wait()
            begin = time.perf_counter()
            run()
            self._wait()
            durations.append(time.perf_counter() - begin)
        return min(durations)

    def _empty_caches(self) -> None:
        if self._flush is None:
            self._flush = torch.zeros(_FLUSH // 4, device=self.device)
        self._flush.sum()

    def _devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def timings(device: torch.device) -> Timings:
    """Return the timings for the current settings of a device. A change of this file starts a new cache."""
    return _timings(device, setting(device))


@cache
def _timings(device: torch.device, settings: str) -> Timings:
    name = hashlib.blake2b(settings.encode() + Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return Timings(device, directory() / f"timings-{name}.json")
