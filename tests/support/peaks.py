"""What a piece of work takes of resident memory, in a fork of the test's process."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

import pytest
import torch

from lowbit.memory import peak_bytes, reset_peak

#: ``mallopt``'s number of the size from which memory goes back to the system once it is freed.
_M_MMAP_THRESHOLD = -3


def resident_peak(work: Callable[[], object]) -> int:
    """Bytes by which the fork's high-water mark rises above what it has when ``work`` begins."""
    if not os.path.exists("/proc/self/clear_refs"):
        pytest.skip("the system tells no peak of a part")
    if torch.cuda.is_initialized():
        pytest.skip("a process that uses CUDA cannot be forked")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            libc = ctypes.CDLL(None)
            libc.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
            libc.malloc_trim(0)  # what tests before have freed would be used again without a rise
            torch.set_num_threads(1)
            reset_peak()
            before = peak_bytes()
            work()
            os.write(writer, struct.pack("q", peak_bytes() - before))
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    assert told, "the work has raised an error"
    return struct.unpack("q", told)[0]
