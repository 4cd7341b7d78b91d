"""Whether a process on Linux gives back the memory that tensors free."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from lowbit.memory import heap
from lowbit.memory.rss import resident_bytes

pytestmark = pytest.mark.skipif(not (heap.is_plain() and resident_bytes()), reason="glibc as it comes, and /proc")

#: Frees blocks of 4 MiB, each below a small one that stays: with glibc's own threshold the heap keeps them.
_HOLES = """
import sys, torch
from lowbit.memory import heap, rss
torch.set_num_threads(1)
del_later = torch.ones(4 << 20); del del_later      # glibc raises its threshold to this block's size
took = heap.return_freed() if sys.argv[1] == "returns" else heap.returns_freed()
blocks, small = [], []
for _ in range(32):
    blocks.append(torch.ones(1 << 20)); small.append(torch.ones(1 << 16))
before = rss.resident_bytes()
blocks.clear()
print(took, before - rss.resident_bytes())
"""


def freed(way: str, **environment: str) -> tuple[bool, int]:
    """Whether freed memory is returned, and how many of the 128 MiB were."""
    run = subprocess.run(
        [sys.executable, "-c", _HOLES, way],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    took, size = run.stdout.split()
    return took == "True", int(size)


@pytest.mark.slow
def test_freed_memory_goes_back_once_asked():
    took, size = freed("returns")
    assert took and size > 120 << 20
    took, size = freed("as it is")
    assert not took and size < 64 << 20, "or there is nothing to be done on this system"


@pytest.mark.slow
def test_settings_of_the_user_stay():
    took, _ = freed("returns", MALLOC_MMAP_THRESHOLD_="67108864")
    assert not took
    took, _ = freed("returns", GLIBC_TUNABLES="glibc.malloc.mmap_threshold=67108864")
    assert not took


def test_only_scarce_memory_is_worth_its_page_faults():
    assert heap.is_scarce(100, 100) and heap.is_scarce(149, 100) and not heap.is_scarce(150, 100)
