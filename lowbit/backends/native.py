"""Loads the native library of the CPU and CUDA backends, and says why it or a part of it is missing."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit import formats
from lowbit.backends.registry import Impl, Run, forced

__all__ = ["LIBRARY", "build_notice", "features", "load", "loading_error", "with_warning"]

#: The library of torch ops, which CMake builds into the package.
LIBRARY = Path(__file__).parents[1] / "lowbit_ops.so"

_REBUILD = (
    "with a C++ compiler, run `make build` in a checkout, or install lowbit again: "
    "`pip install -v --force-reinstall --no-deps --no-cache-dir .` in the folder of its sources"
)


# -- the library -------------------------------------------------------------------------------------------------------
def build_notice() -> str | None:
    """The parts that the build left out, and the remedy; None if nothing is missing."""
    record = _record()
    if record is None:
        return f"the native code was not built; {_REBUILD}"
    notice = record["notice"]
    return None if notice is None else str(notice)


def _record() -> dict[str, Any] | None:
    """The build record that setup.py wrote, or None."""
    path = LIBRARY.with_name("_build.json")
    return dict(json.loads(path.read_text())) if path.exists() else None


@cache
def loading_error() -> str | None:
    """Load the native ops, once. Returns None, or why they are missing and the remedy."""
    if not LIBRARY.exists():
        return build_notice() or f"{LIBRARY.name} is not in the package; {_REBUILD}"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY} cannot be loaded ({error.__cause__ or error}); build it for this torch: {_REBUILD}"
    return _stale()


def _stale() -> str | None:
    """Why the loaded library is not used: it was built with another table of formats, or defines its own schemas."""
    ops = torch.ops.lowbit_native
    if hasattr(ops, "keep"):
        return f"{LIBRARY.name} was built from older sources, whose kernels take other arguments; rebuild: make build"
    if hasattr(ops, "fingerprint") and ops.fingerprint() == formats.fingerprint():
        return None
    return f"{LIBRARY.name} was built with another table of formats than lowbit/formats.py has; rebuild: make build"


def with_warning(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``rows`` of the reference, which warn once on the CPU if the native library is wanted and missing.

    pip does not show build notices, so this warning is the first notice. ``use_backend`` silences it.
    """
    if loading_error() is None or not (_record() or {}).get("wanted", True):
        return rows
    return tuple(replace(row, run=_warning(row.run)) for row in rows)


def _warning(run: Run) -> Run:
    def run_and_say(outs: tuple[Tensor, ...], call: Any) -> None:
        if outs[0].device.type == "cpu" and forced() is None:
            _warn()
        run(outs, call)

    return run_and_say


@cache
def _warn() -> None:
    warnings.warn(
        f"lowbit runs on its reference, which is slow: {loading_error()}. To be silent: install with LOWBIT_NATIVE=0, "
        "or warnings.filterwarnings('ignore', 'lowbit runs on its reference')",
        RuntimeWarning,
        stacklevel=3,
    )


def load() -> Any:
    """``torch.ops.lowbit_native``. Raises RuntimeError if it is missing."""
    error = loading_error()
    if error is not None:
        raise RuntimeError(error)
    return torch.ops.lowbit_native


def features() -> list[str]:
    """The features that kernels use and the processor has; empty without the native module."""
    try:
        from lowbit import _native  # type: ignore[attr-defined]
    except ImportError:
        return []
    return list(_native.cpu_features())
