"""The native CPU backend: C++ kernels for several instruction sets, the best of which is chosen at run time.

The environment variable ``LOWBIT_ISA`` and ``with isa("avx2"):`` choose another. Results are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from lowbit.backends import composed, cpu_mm, native, native_ops

__all__ = ["IMPLS", "isa", "isas", "processor", "unavailable"]

#: For kernels that do not support every call of their op.
_SUPPORTS: dict[str, Callable[[Any], str | None]] = {"conv": cpu_mm.no_conv}
_ROWS = tuple(
    replace(row, supports=_SUPPORTS[row.op]) if row.op in _SUPPORTS else row for row in native_ops.rows("cpu")
)
_ROUNDING = cpu_mm.rounding(_ROWS)

#: ``cpu_patches``: convolutions in schemes that the native kernel does not support.
IMPLS = (
    *_ROWS,
    *_ROUNDING,
    *composed.grouped(_ROWS + _ROUNDING),
    *composed.quantize_both(_ROWS),
    *composed.quantize_global(_ROWS),
    *(replace(row, name="cpu_patches") for row in composed.conv(_ROWS)),
)


def unavailable() -> str | None:
    """Why this backend is absent, and the remedy; None if it is present."""
    return native.loading_error()


def isas() -> list[str]:
    """Instruction sets that the processor supports and the build contains, ``scalar`` first."""
    return list(native.load().isas())


def processor() -> dict[str, str]:
    """The processor features and instruction set that kernels use, or the reasons why they are unknown."""
    try:
        from lowbit import _native  # type: ignore[attr-defined]
    except ImportError as error:
        return {"native module": f"missing: {error}"}
    entries: dict[str, Callable[[], str]] = {
        "cpu features": lambda: " ".join(_native.cpu_features()),
        "instruction set": _native.isa,
    }
    return {key: _text(entry) for key, entry in entries.items()}


def _text(entry: Callable[[], str]) -> str:
    try:
        return entry()
    except ValueError as error:  # LOWBIT_ISA or LOWBIT_WITHOUT has a name that is not available
        return f"unusable: {error}; correct or unset LOWBIT_ISA and LOWBIT_WITHOUT"


@contextmanager
def isa(name: str) -> Iterator[None]:
    """Run the CPU kernels of all threads with one instruction set, for tests and comparisons.

    Args:
        name: One of ``isas()``.

    Raises:
        ValueError: The instruction set is not available; the message names those that are.
    """
    ops = native.load()
    before = ops.isa()
    ops.force_isa(name)
    try:
        yield
    finally:
        ops.force_isa(before)
