"""The native library that the CPU and CUDA backends call: where it is, whether it can be loaded, and what it was built
without.
"""

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

#: The torch ops, built by CMake into the package.
LIBRARY = Path(__file__).parents[1] / "lowbit_ops.so"

_REBUILD = (
    "with a C++ compiler there, run `make build` in a checkout, or install lowbit again: "
    "`pip install -v --force-reinstall --no-deps --no-cache-dir .` in the folder of its sources"
)


# -- the library -------------------------------------------------------------------------------------------------------
def build_notice() -> str | None:
    """What the build of the native code had to leave out, and how to get it; None where nothing is missing."""
    record = _record()
    if record is None:
        return f"the native code was not built; {_REBUILD}"
    notice = record["notice"]
    return None if notice is None else str(notice)


def _record() -> dict[str, Any] | None:
    """What setup.py wrote of the build."""
    path = LIBRARY.with_name("_build.json")
    return dict(json.loads(path.read_text())) if path.exists() else None


@cache
def loading_error() -> str | None:
    """Load the native ops once; None, or why they cannot be had and how to get them."""
    if not LIBRARY.exists():
        return build_notice() or f"{LIBRARY.name} is not in the package; {_REBUILD}"
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        return f"{LIBRARY} cannot be loaded ({error.__cause__ or error}); build it for this torch: {_REBUILD}"
    return _stale()


def _stale() -> str | None:
    """Why the library that was loaded is not used: it was generated from another table of formats, or it is older than
    the rule that schemas are made of the table of ops."""
    ops = torch.ops.lowbit_native
    if hasattr(ops, "keep"):
        return f"{LIBRARY.name} was built from older sources, whose kernels take other arguments; rebuild: make build"
    if hasattr(ops, "fingerprint") and ops.fingerprint() == formats.fingerprint():
        return None
    return f"{LIBRARY.name} was built with another table of formats than lowbit/formats.py has; rebuild: make build"


def with_warning(rows: tuple[Impl, ...]) -> tuple[Impl, ...]:
    """``rows`` of the reference; where the native library is absent and was wanted, they warn once on the CPU.

    pip shows no notices of a build, so this is the first that a user hears of it. Silent under ``use_backend``.
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
    """``torch.ops.lowbit_native``. Raises RuntimeError where it cannot be had."""
    error = loading_error()
    if error is not None:
        raise RuntimeError(error)
    return torch.ops.lowbit_native


def features() -> list[str]:
    """The processor features that kernels ask for, those present; none without the module that knows them."""
    try:
        from lowbit import _native  # type: ignore[attr-defined]
    except ImportError:
        return []
    return list(_native.cpu_features())
