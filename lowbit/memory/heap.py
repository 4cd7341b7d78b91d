"""The heap of the process on Linux: whether memory that tensors free goes back to the system."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache

__all__ = ["SCARCE", "THRESHOLD", "is_plain", "is_scarce", "return_freed", "returns_freed", "trim"]

#: Allocations of at least so many bytes are pages of their own from then on, which the system has back at once. Less
#: costs more page faults than it is worth: at 256 KiB a small GPT held a tenth to a quarter less, and its step took
#: twice the time.
THRESHOLD = 1 << 20
#: A budget of so many times plain training leaves room for a heap with holes.
SCARCE = 1.5
#: ``mallopt``'s number of the threshold.
_M_MMAP_THRESHOLD = -3

_returns = False


@cache
def is_plain() -> bool:
    """Whether memory comes from a glibc that nobody configured."""
    told = any(name.startswith("MALLOC_") for name in os.environ)
    other = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or "malloc" in os.environ.get("LD_PRELOAD", "")
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and not (told or other)


def is_scarce(budget: int, plain: int) -> bool:
    """Whether a budget is so near to what plain training holds that page faults are worth their time."""
    return budget < SCARCE * plain


def return_freed() -> bool:
    """Let glibc give the memory of large tensors back as they are freed, for the rest of the process.

    By itself it raises its threshold to the largest block that was freed, up to 32 MiB, and keeps freed blocks in a
    heap with holes: a process held 1.3 to 5 times the bytes of its tensors. Settings of the user (``MALLOC_...`` and
    ``GLIBC_TUNABLES`` in the environment, another allocator) are left as they are.

    Returns:
        Whether it does so now.
    """
    global _returns
    if not _returns and is_plain():
        _returns = ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, THRESHOLD) == 1
    return _returns


def returns_freed() -> bool:
    """Whether ``return_freed`` has taken effect."""
    return _returns


def trim() -> None:
    """Give back what lies free in the heap."""
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if give_back is not None:  # musl has none
        give_back(0)
