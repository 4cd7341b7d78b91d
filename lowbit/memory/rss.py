"""Memory of this process, resident now and at its peak, and memory of the system and its devices."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from lowbit.sizes import amount

__all__ = ["SystemMemory", "available_bytes", "peak_bytes", "reset_peak", "resident_bytes", "system_memory"]


class SystemMemory(NamedTuple):
    """Memory of a device, or of the host for a CPU, and of this process on it, in bytes.

    Attributes:
        device: ``"cpu"``, or a CUDA device.
        free: Bytes that can be allocated; None if unknown.
        total: Bytes of the device or the host; None if unknown.
        process: Bytes of this process. On a CPU these are resident; on CUDA torch's allocator has reserved them.
    """

    device: str
    free: int | None
    total: int | None
    process: int

    def __str__(self) -> str:
        if self.free is None or self.total is None:
            return f"unknown on this system, {amount(self.process)} of this process"
        return f"{amount(self.free)} free of {amount(self.total)}, {amount(self.process)} of this process"


def system_memory(device: torch.device | str = "cpu") -> SystemMemory:
    """Return the memory of ``device`` now. Limits of containers are not included.

    Args:
        device: A CUDA device. All other devices stand for the host.
    """
    target = torch.device(device)
    if target.type == "cuda":
        free, total = torch.cuda.mem_get_info(target)
        return SystemMemory(str(target), free, total, torch.cuda.memory_reserved(target))
    return SystemMemory("cpu", available_bytes(), _meminfo("MemTotal"), resident_bytes())


def reset_peak() -> bool:
    """Reset the peak of ``peak_bytes`` to the resident memory of now.

    Returns:
        False if the system does not support it (all except Linux).
    """
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """Return the peak resident memory in bytes: since ``reset_peak`` if that is supported, else since the process
    started.
    """
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """Return the bytes that can be allocated without swapping, or None if unknown (all systems except Linux)."""
    return _meminfo("MemAvailable")


def _meminfo(field: str) -> int | None:
    """Return a field of /proc/meminfo in bytes, or None if there is none."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def resident_bytes() -> int:
    """Return the resident memory in bytes, or 0 if unknown (all systems except Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
