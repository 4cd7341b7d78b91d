"""What an op takes of time on this machine: the op itself is run on made-up tensors of its shapes, once, and the time
is kept in a file.

Between runs a large buffer is read, as in a step other ops come between two calls: tensors are not in the caches.
Instructions are, since a step calls few ops: a short op is run on other tensors just before.

Source: the operator benchmarks of torch.distributed._tools.runtime_estimator, which time each call of a step anew.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lowbit.memory.runnable import FAILURES, MOST, Call, Kept, directory, made, setting, within

__all__ = ["Timings", "timings"]

#: What is read between runs.
_FLUSH = 48 << 20
#: A call is run this often; one that takes less than ``_SHORT`` seconds more often, and after a call on other tensors.
#: The least counts: what disturbs a run only adds to it, and a median of few took a disturbed calibration for what the
#: op takes.
_RUNS, _MORE, _SHORT = 3, 7, 1e-3


class Timings:
    """Seconds of calls on ``device``, kept in ``path``."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self.device, self.path = device, path
        self._known: dict[Call, float | None] = {}
        self._kept = Kept(path, float)
        self._flush: Tensor | None = None

    def seconds(self, call: Call) -> float | None:
        """What the call takes; None where it cannot be run on tensors that are made up."""
        if call not in self._known:
            found = self._kept.get(call)
            if found is None:
                found = self._measured(call)
                if found is not None:
                    self._kept.put(call, found)
            self._known[call] = found
        return self._known[call]

    def save(self) -> None:
        """Add what is new to the file, and let go what was read between runs."""
        self._flush = None
        self._kept.save()

    def _measured(self, call: Call) -> float | None:
        part, share = within(call, MOST)
        if part.bytes > MOST:
            return None
        try:
            with torch.no_grad(), torch.random.fork_rng(self._devices()):
                run = made(part, self.device)
                seconds = self._least(run, 1)
                if seconds < _SHORT:
                    seconds = self._least(run, _MORE, before=made(part, self.device))
                else:
                    seconds = min(seconds, self._least(run, _RUNS - 1))
        except FAILURES:
            return None
        return seconds * share

    def _least(self, run: Callable[[], object], runs: int, before: Callable[[], object] = lambda: None) -> float:
        """Seconds of the fastest run. ``before`` runs just before each, when the caches were emptied."""
        found = []
        for _ in range(runs):
            self._empty_caches()
            before()
            self._wait()
            begin = time.perf_counter()
            run()
            self._wait()
            found.append(time.perf_counter() - begin)
        return min(found)

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
    """The timings of a device by what decides them as it is now, and by how this file measures."""
    return _timings(device, setting(device))


@cache
def _timings(device: torch.device, decides: str) -> Timings:
    name = hashlib.blake2b(decides.encode() + Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return Timings(device, directory() / f"timings-{name}.json")
