"""Memory that an op allocates on this machine, measured by running it once on synthetic tensors.

A kernel may copy its input into another layout or allocate a workspace. The size depends on shapes, strides, threads
and the library. So it is measured from the allocator's events and cached in a file, like the time of the op.
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

from lowbit.memory.cost import rates
from lowbit.memory.measure import counting
from lowbit.memory.runnable import (
    FAILURES,
    MOST,
    Call,
    CallCache,
    Prepared,
    directory,
    fewer_rows,
    prepared,
    setting,
    shorter,
    within,
)
from lowbit.torch_private import DeviceType, without_modes

__all__ = ["Footprint", "Footprints", "footprints"]

#: Prefix of the profiler events that mark calls.
_MARK = "lowbit.footprint#"
#: Seconds of arithmetic. Of a longer call, two shorter ones are run.
_LONG = 0.02
#: Their sizes are no less: kernels for few rows may allocate differently.
_LEAST = 32


class Footprint(NamedTuple):
    """Bytes that a call allocates.

    Attributes:
        scratch: Most bytes held at a time, besides the results.
        results: Bytes of each new storage of the results, in order.
    """

    scratch: int
    results: tuple[int, ...]


class Footprints:
    """Footprints of calls on ``device``, cached in the file ``path``."""

    def __init__(self, device: torch.device, path: Path) -> None:
        self.device = device
        self._known: dict[Call, Footprint | None] = {}
        self._cache = CallCache(path, lambda value: Footprint(int(value[0]), tuple(map(int, value[1]))))

    def of(self, calls: Iterable[Call], run: bool = True) -> dict[Call, Footprint]:
        """Return the footprints of calls. With ``run``, unknown calls are run.

        Calls that fail on synthetic tensors, or that are larger than ``MOST``, are left out.
        """
        wanted = dict.fromkeys(calls)
        unknown = []
        for call in wanted:
            if call not in self._known:
                cached = self._cache.get(call)
                if cached is not None:
                    self._known[call] = cached
                else:
                    unknown.append(call)
        if unknown and run:
            self._measure(unknown)
        return {call: footprint for call in wanted if (footprint := self._known.get(call)) is not None}

    def _measure(self, calls: list[Call]) -> None:
        samples = [self._samples(call) for call in calls]
        retried = [
            call for call, row, footprint in zip(calls, samples, self._measured(calls, samples), strict=True)
            if footprint is None and len(row) > 1
        ]  # fmt: skip
        self._measured(retried, [[_runnable_part(call)] for call in retried])
        self._cache.save()

    def _measured(self, calls: list[Call], samples: list[list[tuple[Call, float]]]) -> list[Footprint | None]:
        """Run the samples of calls, and return and store the calls' footprints."""
        parts = [part for row in samples for part, _ in row]
        # Gradients are enabled, because some ops allocate a workspace only then. No tensor requires one.
        with without_modes(), torch.inference_mode(False), torch.enable_grad():
            results = iter(_run([part if part.bytes <= MOST else None for part in parts], self.device) if parts else [])
        footprints = []
        for call, row in zip(calls, samples, strict=True):
            measured = [next(results) for _ in row]
            if len(row) > 1:
                footprint = _on_line(row, measured, call)
            else:
                footprint = None if measured[0] is None else _scaled(measured[0], row[0][1], call)
            footprints.append(footprint)
            self._known[call] = footprint
            if footprint is not None:
                self._cache.put(call, footprint)
        return footprints

    def _samples(self, call: Call) -> list[tuple[Call, float]]:
        """Return the calls to run instead of ``call``: itself or a part, or two shorter ones if it takes long.

        With each comes the ratio of the full call's memory, or of its work, to its own.
        """
        at = rates(self.device)
        large = shorter(call, lambda work: work.seconds(at) / _LONG, _LEAST, rounds=1)
        small = shorter(call, lambda work: 2 * work.seconds(at) / _LONG, _LEAST, rounds=1, only=large.sizes)
        if small.ratio > large.ratio > 1.0 and large.call.bytes <= MOST:
            return [(large.call, large.ratio), (small.call, small.ratio)]
        return [_runnable_part(call)]


def _on_line(samples: list[tuple[Call, float]], measured: list[Footprint | None], call: Call) -> Footprint | None:
    """Return the footprint on the line through those of two shorter calls, by their share of the work.

    None if the results are then not those of ``call``.
    """
    large, small = measured
    if large is None or small is None or len(large.results) != len(small.results):
        return None
    (_, ratio), (_, smaller_ratio) = samples
    steps = (1 - 1 / ratio) / (1 / ratio - 1 / smaller_ratio)

    def full(at_large: int, at_small: int) -> int:
        return max(round(at_large + steps * (at_large - at_small)), 0)

    results = tuple(map(full, large.results, small.results))
    agrees = abs(sum(results) - call.results) <= 0.02 * call.results
    return Footprint(full(large.scratch, small.scratch), results) if agrees else None


def _runnable_part(call: Call) -> tuple[Call, float]:
    """Return a part of the call that can be run, and the ratio of the full call's memory to the part's."""
    part, share = within(call, MOST)
    return (part, share) if part.bytes <= MOST else fewer_rows(call, MOST)


def _scaled(part: Footprint, share: float, call: Call) -> Footprint | None:
    """Scale the footprint of a part to the full call. Return None if its results do not scale with the part."""
    if share == 1.0:
        return part
    if abs(sum(part.results) * share - call.results) > 0.02 * call.results:
        return None
    return Footprint(int(part.scratch * share), ())


def _run(calls: list[Call | None], device: torch.device) -> list[Footprint | None]:
    """Run calls, and return what each allocated."""
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
        run = prepared(call, device)
        with record_function(f"{_MARK}{number}"):
            out = run()
        results[number] = _new_storages(run, out)
    except FAILURES:
        return


def _on_cuda(call: Call, device: torch.device) -> Footprint | None:
    try:
        run = prepared(call, device)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        out = run()
        torch.cuda.synchronize(device)
        results = _new_storages(run, out)
        return Footprint(max(torch.cuda.max_memory_allocated(device) - before - sum(results), 0), results)
    except FAILURES:
        return None


def _new_storages(run: Prepared, out: Any) -> tuple[int, ...]:
    """Return the bytes of result storages that no argument shares."""
    arguments = {entry._cdata for leaf in tree_leaves((run.args, run.kwargs)) for entry in _storages(leaf)}
    sizes = {entry._cdata: entry.nbytes() for leaf in tree_leaves(out) for entry in _storages(leaf)}
    return tuple(size for key, size in sizes.items() if size and key not in arguments)


def _storages(leaf: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage()] if isinstance(leaf, Tensor) and leaf.layout == torch.strided else []


def _peaks(events: Iterable[Any]) -> dict[int, int]:
    """Return the most bytes held within each mark, above those at its start, by the mark's number."""
    changes, marks = [], []
    for event in events:
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU:
            changes.append((event.start_ns(), event.nbytes()))
        elif event.name().startswith(_MARK):
            marks.append((event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name()[len(_MARK) :])))
    changes.sort(key=lambda change: change[0])
    marks.sort()
    peaks, index = {}, 0
    for begin, end, number in marks:
        current = peak = 0
        while index < len(changes) and changes[index][0] < begin:
            index += 1
        while index < len(changes) and changes[index][0] <= end:
            current += changes[index][1]
            peak = max(peak, current)
            index += 1
        peaks[number] = peak
    return peaks


def footprints(device: torch.device) -> Footprints:
    """Return the footprints for the current settings of a device. A change of this file starts a new cache."""
    return _footprints(device, setting(device))


@cache
def _footprints(device: torch.device, settings: str) -> Footprints:
    name = hashlib.blake2b(settings.encode() + Path(__file__).read_bytes(), digest_size=8).hexdigest()
    return Footprints(device, directory() / f"footprints-{name}.json")
