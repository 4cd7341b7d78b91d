"""Limits and measures the memory of a process: one row of ``LIMITS`` per device type."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbit.memory.rss import peak_bytes, reset_peak

__all__ = ["LIMITS", "Limit"]


@dataclass(frozen=True)
class Limit:
    """Functions that limit and measure the memory of this process on a device, in bytes."""

    within: Callable[[int], AbstractContextManager[None]]
    """``within(budget)``: a context in which the process may allocate ``budget`` more bytes. Above it, allocations fail
    with an error that ``lowbit.memory.shortage.ran_out`` recognizes."""
    counted: Callable[[], int]
    """The bytes that the limit counts."""
    held: Callable[[], int]
    """The bytes in use."""
    reset: Callable[[], object]
    """Restarts ``peak``."""
    peak: Callable[[], int]
    """The largest ``held`` since ``reset``."""
    unit: str
    """Description of ``held`` and ``peak``."""
    target: Callable[[str], str]
    """``target(directory)``: the offload target."""


# -- CPU --------------------------------------------------------------------------------------------------------------
def _status(field: str) -> int:
    """Return a field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; the ladder on a CPU needs Linux 4.7 or later")


@contextmanager
def _data_within(budget: int) -> Iterator[None]:
    """Limit private anonymous memory with RLIMIT_DATA. Only the soft limit changes, so that it can be restored.

    Raises RuntimeError on other systems than Linux, which do not enforce it.
    """
    if sys.platform != "linux":
        raise RuntimeError(
            f"expected Linux, whose RLIMIT_DATA limits the memory of a process, got {sys.platform}; run the ladder on "
            f"a Linux machine, or on a GPU with --device cuda"
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_status("VmData") + budget, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


# -- CUDA -------------------------------------------------------------------------------------------------------------
@contextmanager
def _fraction_within(budget: int) -> Iterator[None]:
    """Limit the bytes that the caching allocator reserves to a fraction of the device."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + budget) / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


LIMITS = {
    "cpu": Limit(
        _data_within, lambda: _status("VmData"), lambda: _status("VmRSS"), reset_peak, peak_bytes,
        "resident memory of the process", target=lambda directory: directory,
    ),
    "cuda": Limit(
        _fraction_within, torch.cuda.memory_reserved, torch.cuda.memory_allocated, torch.cuda.reset_peak_memory_stats,
        torch.cuda.max_memory_allocated, "memory of torch's allocator on the GPU",
        target=lambda directory: "cpu",
    ),
}  # fmt: skip
