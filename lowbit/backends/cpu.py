"""The native CPU backend: C++ kernels compiled for several instruction sets, the best of which is chosen at run time.

``LOWBIT_ISA`` in the environment, or ``with isa("avx2"):``, chooses another; every one gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lowbit.backends import cpu_mm, native
from lowbit.backends.registry import Impl

__all__ = ["IMPLS", "isa", "isas", "unavailable"]


IMPLS = tuple(Impl(op, "cpu", ("cpu",), 10, run) for op, run in native.RUN.items()) + cpu_mm.IMPLS


def unavailable() -> str | None:
    """Why this backend is absent, and how to get it; None where it is there."""
    return native.loading_error()


def isas() -> list[str]:
    """The instruction sets that this processor runs and the build contains, ``scalar`` first."""
    return list(native.load().isas())


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Run the CPU kernels (of every thread of the process) with one instruction set, for tests and comparisons.

    Raises: ValueError, naming those available, for one that is not.
    """
    ops = native.load()
    before = ops.isa()
    ops.force_isa(name)
    try:
        yield
    finally:
        ops.force_isa(before)
