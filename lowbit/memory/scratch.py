"""What kernels allocate for themselves while they run, in bytes, by op: what no one outside of the kernel sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

__all__ = ["SCRATCH", "scratch_bytes"]

#: Of an op's arguments and its results.
Scratch = Callable[[tuple[Any, ...], Any], int]

SCRATCH: dict[str, Scratch] = {}


def scratch_bytes(name: str, args: tuple[Any, ...], out: Any) -> int:
    """What the op called ``name`` allocates beside its results; 0 for those that are not known to."""
    found = SCRATCH.get(name)
    return 0 if found is None else found(args, out)
