"""``clear`` frees what nothing refers to, and says how much that was."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

import lowbit as lb
from lowbit.memory import Cleared, clearing, heap


class Cycle(nn.Module):
    """A module that refers to itself, so that only the garbage collector frees it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size))
        self.owner = [self]


def test_cycles_are_freed_and_other_tensors_stay():
    kept, cycle = torch.ones(1000), Cycle(10)
    freed = weakref.ref(cycle.weight)
    gc.disable()
    try:
        del cycle
        assert freed() is not None
        report = lb.memory.clear()
    finally:
        gc.enable()
    assert freed() is None and report.objects > 0 and kept.sum() == 1000
    assert report.reserved_before is None and report.reserved_after is None
    assert f"objects collected: {report.objects:,}" in str(report) and "CUDA" not in str(report)


@pytest.mark.skipif(not heap.is_plain(), reason="needs glibc with its default settings")
def test_pages_of_the_heap_go_back_to_the_system():
    """Small blocks are in the heap. One that is alive above them keeps the pages of the others."""
    blocks = [bytearray(60_000) for _ in range(1000)]
    last = bytearray(60_000)
    del blocks
    report = lb.memory.clear()
    assert report.resident_before - report.resident_after > 30_000_000 and len(last) == 60_000
    assert "less)" in str(report)


def test_cuda_caches_are_emptied_on_the_devices_in_use(monkeypatch):
    """Without a GPU: a double of torch.cuda with two devices, of which one has reserved memory."""
    sizes, calls = {0: 0, 1: 3 << 20}, list[object]()

    def empty() -> None:
        calls.append("empty")
        sizes[1] = 1 << 20

    doubles = {
        "is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 2,
        "memory_reserved": sizes.__getitem__, "synchronize": calls.append, "empty_cache": empty,
    }  # fmt: skip
    for name, double in doubles.items():
        monkeypatch.setattr(clearing.torch.cuda, name, double)
    report = lb.memory.clear()
    assert calls == [1, "empty"]
    assert (report.reserved_before, report.reserved_after) == (3 << 20, 1 << 20)
    assert "reserved on CUDA: 3.00 MiB before, 1.00 MiB after (2.00 MiB less)" in str(report)


def test_unknown_resident_memory_is_said():
    assert "resident: unknown" in str(Cleared(0, 0, 0, None, None))
