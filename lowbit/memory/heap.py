"""The glibc heap of the process: whether memory of freed tensors is returned to the system."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

__all__ = ["SCARCE", "THRESHOLD", "is_plain", "is_scarce", "return_freed", "returns_freed", "trim"]

#: Larger allocations get their own pages, which are returned as soon as they are freed. A smaller threshold costs too
#: many page faults: with 256 KiB a small GPT held 10% to 25% less, and its step took twice as long.
THRESHOLD = 1 << 20
#: With a budget of this multiple of plain training's memory, fragmentation of the heap does not matter.
SCARCE = 1.5
#: ``mallopt``'s parameter for the threshold.
_M_MMAP_THRESHOLD = -3

_returns = False


@cache
def is_plain() -> bool:
    """Return whether memory comes from glibc with its default settings."""
    configured = any(name.startswith("MALLOC_") for name in os.environ)
    replaced = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "malloc" in os.environ.get("LD_PRELOAD", "")
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and not (configured or replaced)


def is_scarce(budget: int, plain: int) -> bool:
    """Return whether ``budget`` is so close to plain training's memory that page faults are worth their time."""
    return budget < SCARCE * plain


def return_freed() -> bool:
    """Have glibc return the memory of large tensors when they are freed, for the rest of the process.

    By default glibc raises its threshold to the size of the largest freed block, up to 32 MiB, and keeps freed blocks
    in a fragmented heap: a process held 1.3 to 5 times the bytes of its tensors. User settings are not changed
    (``MALLOC_...`` and ``GLIBC_TUNABLES`` in the environment, another allocator).

    Returns:
        Whether it is in effect now.
    """
    global _returns
    if not _returns and is_plain():
        _returns = ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, THRESHOLD) == 1
    return _returns


def returns_freed() -> bool:
    """Return whether ``return_freed`` is in effect."""
    return _returns


def trim() -> None:
    """Return free memory of the heap to the system."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if give_back is not None:  # musl has none
        give_back(0)
