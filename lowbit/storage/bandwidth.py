"""Measurement of the bandwidth of offload targets, once per process and target."""

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

#: Bytes per copy, and number of copies; the fastest one counts.
_BYTES, _TIMES = 32 << 20, 3


class Bandwidth(NamedTuple):
    """Bandwidth of an offload target.

    Attributes:
        write: Bytes per second to the target.
        read: Bytes per second from the target.
    """

    write: float
    read: float


def bandwidth(target: str | os.PathLike[str]) -> Bandwidth:
    """Measure the bandwidth of an offload target.

    The first call for a target copies 32 MiB three times in each direction; later calls return the same result. Writes
    to a directory are timed until they are on the disk. Reads come from the disk if the system can drop its cache.

    Args:
        target: ``"cpu"``, pinned memory from the current CUDA device; or a directory. Without a CUDA device, ``"cpu"``
            measures copies within memory.

    Raises:
        OSError: The directory cannot be written to.
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
