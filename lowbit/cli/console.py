"""Where the commands print: results to standard output, progress and errors to standard error."""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text

__all__ = ["MISTAKES", "errors", "out", "print_error", "print_json", "resumable", "size"]

#: No markup: paths and names in messages may hold brackets. What is styled is a ``Text``, or has a ``style``.
out = Console(highlight=False, markup=False)
errors = Console(stderr=True, markup=False)


#: Errors whose message tells a user what to do; of others the origin is told.
MISTAKES = (ValueError, OSError, ArithmeticError, RuntimeError, ImportError)


def print_error(error: Exception) -> None:
    """The message of a user's mistake alone; with LOWBIT_TRACEBACK=1, and of any other error, where it comes from."""
    if os.environ.get("LOWBIT_TRACEBACK") or not isinstance(error, MISTAKES):
        traceback.print_exception(error)
        return
    message = Text.assemble(("error:", "bold red"), " ", str(error) or type(error).__name__)
    errors.print(message, highlight=False, soft_wrap=True)


@contextmanager
def resumable() -> Iterator[None]:
    """Inside, an interrupt says that the same command goes on with what is finished."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("the same command goes on") from None


def print_json(value: Any) -> None:
    """``value`` as strict JSON: what JSON cannot hold (Inf, NaN) becomes a string."""
    print(json.dumps(_strict(value), indent=2))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
