"""Console output of the commands: results to standard output, progress and errors to standard error."""

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

#: No markup: paths and names in messages may contain brackets.
out = Console(highlight=False, markup=False)
errors = Console(stderr=True, markup=False)

#: Errors whose message tells the user what to do; other errors print a traceback.
MISTAKES = (ValueError, OSError, ArithmeticError, RuntimeError, ImportError)


def print_error(error: Exception) -> None:
    """Print the message of a user error; print a traceback of other errors, or if LOWBIT_TRACEBACK is set."""
    if os.environ.get("LOWBIT_TRACEBACK") or not isinstance(error, MISTAKES):
        traceback.print_exception(error)
        return
    message = Text.assemble(("error:", "bold red"), " ", str(error) or type(error).__name__)
    errors.print(message, highlight=False, soft_wrap=True)


@contextmanager
def resumable() -> Iterator[None]:
    """Context in which Ctrl-C tells the user that repeating the command continues the run."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("repeat the command to continue") from None


def print_json(value: Any) -> None:
    """Print ``value`` as strict JSON: Inf and NaN become strings."""
    print(json.dumps(_strict(value), indent=2))


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def size(count: float) -> str:
    """A number of bytes in binary units, such as ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"
