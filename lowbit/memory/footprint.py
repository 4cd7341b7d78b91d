"""What an op allocates on this machine: it is run once on made-up tensors, and the allocator's events are counted.

A kernel may copy its input into another layout, or keep a workspace that nobody outside sees. How much depends on
shapes, strides, threads and the library, so it is measured and kept in a file, like the time of the op.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import record_function
from torch.utils._pytree import tree_leaves

from lowbit.memory.measure import counting
from lowbit.memory.runnable import FAILURES, MOST, Call, Kept, Made, directory, fewer_rows, made, setting, within
from lowbit.torch_private import DeviceType, without_modes

__all__ = ["Footprint", "Footprints", "footprints"]

#: How a call is marked among the profiler's events.
_MARK = "lowbit.footprint#"


class Footprint(NamedTuple):
    """Bytes that a call allocates.

    Attributes:
        scratch: The most at a time, beside its results.
        results: Those of each new storage among its results, in their order.
    """

    scratch: int
    results: tuple[int, ...]


class Footprints:
    """Footprints of calls on ``device``, kept in ``path``."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self.device = device
        self._known: dict[Call, Footprint | None] = {}
        self._kept = Kept(path, lambda value: Footprint(int(value[0]), tuple(map(int, value[1]))))

    def of(self, calls: Iterable[Call], run: bool = True) -> dict[Call, Footprint]:
        """The footprints of calls; those that are not known are run, if asked. Left out are calls that fail on tensors
        that are made up, and those larger than ``MOST``.
        """
        wanted = dict.fromkeys(calls)
        unknown = []
        for call in wanted:
            if call not in self._known:
                kept = self._kept.get(call)
                if kept is not None:
                    self._known[call] = kept
                else:
                    unknown.append(call)
        if unknown and run:
            self._measure(unknown)
        return {call: found for call in wanted if (found := self._known.get(call)) is not None}

    def _measure(self, calls: list[Call]) -> None:
        parts = [_within(call) for call in calls]
        # Gradients are on, as in a forward: some ops make their workspace only then. No tensor asks for one.
        with without_modes(), torch.inference_mode(False), torch.enable_grad():
            found = _run([part if part.bytes <= MOST else None for part, _ in parts], self.device)
        for call, (_, share), footprint in zip(calls, parts, found, strict=True):
            whole = None if footprint is None else _whole(footprint, share, call)
            self._known[call] = whole
            if whole is not None:
                self._kept.put(call, whole)
        self._kept.save()


def _within(call: Call) -> tuple[Call, float]:
    """A part of the call that can be run, and how many times as much the whole one allocates."""
    part, share = within(call, MOST)
    return (part, share) if part.bytes <= MOST else fewer_rows(call, MOST)


def _whole(part: Footprint, share: float, call: Call) -> Footprint | None:
    """The footprint of a call of which a part was run; None if its results do not grow with the part."""
    if share == 1.0:
        return part
    if abs(sum(part.results) * share - call.results) > 0.02 * call.results:
        return None
    return Footprint(int(part.scratch * share), ())


def _run(calls: list[Call | None], device: torch.device) -> list[Footprint | None]:
    """Run calls, and read what each allocated."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng([device] if on_gpu else []):
        if on_gpu:
            return [None if call is None else _on_cuda(call, device) for call in calls]
        results: dict[int, tuple[int, ...]] = {}
        with counting() as recorded:
            for number, call in enumerate(calls):
                if call is not None:
                    _mark(number, call, device, results)
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    peaks = _peaks(recorded.profiler.kineto_results.events())
    return [
        Footprint(max(peaks.get(number, 0) - sum(results[number]), 0), results[number]) if number in results else None
        for number in range(len(calls))
    ]


def _mark(number: int, call: Call, device: torch.device, results: dict[int, tuple[int, ...]]) -> None:
    try:
        run = made(call, device)
        with record_function(f"{_MARK}{number}"):
            out = run()
        results[number] = _new_storages(run, out)
    except FAILURES:
        return


def _on_cuda(call: Call, device: torch.device) -> Footprint | None:
    try:
        run = made(call, device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        out = run()
        torch.cuda.synchronize(device)
        results = _new_storages(run, out)
        return Footprint(max(torch.cuda.max_memory_allocated(device) - before - sum(results), 0), results)
    except FAILURES:
        return None


def _new_storages(run: Made, out: Any) -> tuple[int, ...]:
    """Bytes of storages of results that are none of the arguments'."""
    known = {one._cdata for leaf in tree_leaves((run.args, run.kwargs)) for one in _storages(leaf)}
    found = {one._cdata: one.nbytes() for leaf in tree_leaves(out) for one in _storages(leaf)}
    return tuple(size for key, size in found.items() if size and key not in known)


def _storages(leaf: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage()] if isinstance(leaf, Tensor) and leaf.layout == torch.strided else []


def _peaks(events: Iterable[Any]) -> dict[int, int]:
    """By the number of a mark, the most bytes above those at its start."""
    changes, marks = [], []
    for event in events:
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_MARK):
            marks.append((event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name()[len(_MARK) :])))
    changes.sort(key=lambda change: change[0])
    marks.sort()
    peaks, place = {}, 0
    for begin, end, number in marks:
        held = most = 0
        while place < len(changes) and changes[place][0] < begin:
            place += 1
        while place < len(changes) and changes[place][0] <= end:
            held += changes[place][1]
            most = max(most, held)
            place += 1
        peaks[number] = most
    return peaks


def footprints(device: torch.device) -> Footprints:
    """The footprints of a device by what decides them as it is now, and by how this file measures."""
    return _footprints(device, setting(device))


@cache
def _footprints(device: torch.device, decides: str) -> Footprints:
    name = hashlib.blake2b(decides.encode() + Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return Footprints(device, directory() / f"footprints-{name}.json")
