"""How fast bytes go to a place and come back, measured once a process and place."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from lowbit.machine import fastest
from lowbit.storage import directory
from lowbit.storage.directory import ScratchDirectory

__all__ = ["Bandwidth", "bandwidth"]

#: What is copied, and how often; the fastest copy counts.
_BYTES, _TIMES = 32 << 20, 3


class Bandwidth(NamedTuple):
    """Bytes a second to a place, and from it."""

    write: float
    read: float


def bandwidth(target: str | os.PathLike[str]) -> Bandwidth:
    """The bandwidth of ``"cpu"``, pinned memory from the current CUDA device, or of a directory.

    Writes to a directory count until they are on the disk, and reads come from it where the system can forget what it
    has read. Without a CUDA device ``"cpu"`` is a copy within memory. The first call for a place takes some copies of
    32 MiB. Raises OSError where the directory cannot be written to.
    """
    return _of_host() if target == "cpu" else _of_directory(Path(target).resolve())


@functools.cache
def _of_host() -> Bandwidth:
    cuda = torch.cuda.is_available()
    host = torch.zeros(_BYTES, dtype=torch.uint8, pin_memory=cuda)
    device = torch.zeros(_BYTES, dtype=torch.uint8, device="cuda" if cuda else "cpu")

    def copied(target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)
        if cuda:
            torch.cuda.synchronize()

    return Bandwidth(_rate(lambda: copied(host, device)), _rate(lambda: copied(device, host)))


@functools.cache
def _of_directory(target: Path) -> Bandwidth:
    files = ScratchDirectory(target)
    try:
        path = files.reserve(_BYTES)
        memory = directory.bytes_of(torch.randint(256, (_BYTES,), dtype=torch.uint8, generator=torch.Generator()))
        write = _rate(lambda: directory.write(path, memory, durable=True))
        return Bandwidth(write, _rate(lambda: directory.read(path, memory)))
    finally:
        files.close()


def _rate(copy: Callable[[], object]) -> float:
    return _BYTES / fastest(copy, times=_TIMES)
