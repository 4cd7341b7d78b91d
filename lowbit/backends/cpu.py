"""The native CPU backend: C++ kernels compiled for several instruction sets, the best of which is chosen at run time.

``LOWBIT_ISA`` in the environment, or ``with isa("avx2"):``, chooses another; every one gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lowbit.backends import composed, cpu_mm, native, native_ops

__all__ = ["IMPLS", "isa", "isas", "processor", "unavailable"]


#: What kernels serve not every call of their op.
_SUPPORTS: dict[str, Callable[[Any], str | None]] = {"conv": cpu_mm.no_conv}
_ROWS = tuple(
    replace(row, supports=_SUPPORTS[row.op]) if row.op in _SUPPORTS else row for row in native_ops.rows("cpu")
)
_ROUNDING = cpu_mm.rounding(_ROWS)

#: ``cpu_patches``: convolutions of schemes that the native one leaves out.
IMPLS = (
    *_ROWS,
    *_ROUNDING,
    *composed.grouped(_ROWS + _ROUNDING),
    *composed.quantize_both(_ROWS),
    *composed.quantize_global(_ROWS),
    *(replace(row, name="cpu_patches") for row in composed.conv(_ROWS)),
)


def unavailable() -> str | None:
    """Why this backend is absent, and how to get it; None where it is there."""
    return native.loading_error()


def isas() -> list[str]:
    """The instruction sets that this processor runs and the build contains, ``scalar`` first."""
    return list(native.load().isas())


def processor() -> dict[str, str]:
    """The processor features that kernels see and the instruction set they use; for what cannot be told, the reason."""
    try:
        from lowbit import _native  # type: ignore[attr-defined]
    except ImportError as error:
        return {"native module": f"missing: {error}"}
    asked: dict[str, Callable[[], str]] = {
        "cpu features": lambda: " ".join(_native.cpu_features()),
        "instruction set": _native.isa,
    }
    return {key: _told(ask) for key, ask in asked.items()}


def _told(ask: Callable[[], str]) -> str:
    try:
        return ask()
    except ValueError as error:  # LOWBIT_ISA or LOWBIT_WITHOUT names what is not there
        return f"unusable: {error}; correct or unset LOWBIT_ISA and LOWBIT_WITHOUT"


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
