"""How much memory this process has held at most, and how much there is."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

__all__ = ["available_bytes", "peak_bytes", "reset_peak", "resident_bytes"]


def reset_peak() -> bool:
    """Start the high-water mark again from what is held now; False where the system cannot (all but Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes() -> int:
    """The resident set's high-water mark in bytes, since ``reset_peak`` where that works, else since the start."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    unit = 1 if sys.platform == "darwin" else 1024  # kibibytes but on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def available_bytes() -> int | None:
    """What the system can still give without swapping; None where it does not say (all but Linux)."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def resident_bytes() -> int:
    """What the process has of memory now; 0 where the system does not say (all but Linux)."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
