"""A real limit on a process's memory, and how much it holds: one row of ``LIMITS`` for each kind of device."""

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
    """How memory of a device is limited and counted, in bytes of this process.

    ``within(budget)`` is a context in which the process may take ``budget`` more than it has; beyond it allocations
    fail with an error that ``ran_out`` (lowbit/memory/shortage.py) knows. ``counted`` is what the limit counts.
    ``held`` is what there is now, ``reset`` starts ``peak`` again. ``unit`` says what these two count, ``elsewhere``
    where offload moves tensors to, given a directory.
    """

    within: Callable[[int], AbstractContextManager[None]]
    counted: Callable[[], int]
    held: Callable[[], int]
    reset: Callable[[], object]
    peak: Callable[[], int]
    unit: str
    elsewhere: Callable[[str], str]


# -- CPU --------------------------------------------------------------------------------------------------------------
def _status(field: str) -> int:
    """A field of /proc/self/status in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; the ladder on a CPU needs Linux 4.7 or later")


@contextmanager
def _data_within(budget: int) -> Iterator[None]:
    """RLIMIT_DATA counts private anonymous memory as it is mapped; the soft limit alone moves, so that it can go back.

    Raises RuntimeError on systems that do not enforce it.
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
    """The caching allocator refuses to reserve more than a fraction of the device."""
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
        "resident memory of the process", elsewhere=lambda directory: directory,
    ),
    "cuda": Limit(
        _fraction_within, torch.cuda.memory_reserved, torch.cuda.memory_allocated, torch.cuda.reset_peak_memory_stats,
        torch.cuda.max_memory_allocated, "memory of torch's allocator on the GPU",
        elsewhere=lambda directory: "cpu",
    ),
}  # fmt: skip
