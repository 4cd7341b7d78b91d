"""Resident memory of this process, now and at its peak, and available memory of the system."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

__all__ = ["available_bytes", "peak_bytes", "reset_peak", "resident_bytes"]


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
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
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
