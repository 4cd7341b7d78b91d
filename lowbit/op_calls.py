"""Calls of ``torch.ops.lowbit.*`` that raise the original Python errors.

CPU kernels are in C++ and pass unsupported calls on to Python (csrc/ops_entry.h). C++ only forwards the text of an
error that Python raises there, as a ValueError or RuntimeError. The functions here raise the original error instead.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.torch_private import below_autograd

__all__ = ["OVERLOADS", "call", "failed", "fill", "original"]


class _Failure(threading.local):
    """The error of the last call that C++ passed on and that failed in Python."""

    error: BaseException | None = None


_failure = _Failure()


def failed(error: BaseException) -> None:
    """Stores an error that was raised in Python, below C++."""
    _failure.error = error


def original(error: Exception) -> BaseException:
    """The stored Python error if ``error`` has its text, else ``error`` itself."""
    stored, _failure.error = _failure.error, None
    return stored if stored is not None and str(stored) == str(error) else error


#: Overloads of ops by name; lowbit.backends.dispatch fills it.
OVERLOADS: dict[str, Callable[..., Any]] = {}


def call(name: str, *args: Any) -> Any:
    """Calls ``torch.ops.lowbit.NAME(*args)``. Without grad mode it skips the autograd kernels, which are in Python."""
    try:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return OVERLOADS[name](*args)
        with below_autograd():
            return OVERLOADS[name](*args)
    except (RuntimeError, ValueError) as error:
        raise original(error) from None


def fill(name: str, *args: Any, **outs: Tensor) -> None:
    """Calls ``torch.ops.lowbit.NAME_out``, which fills ``outs``, and increments their versions for autograd's checks.

    Raises:
        RuntimeError: An output requires grad.
    """
    if torch.is_grad_enabled():
        for label, out in outs.items():
            if out.requires_grad:
                raise RuntimeError(
                    f"lowbit.{name}: {label} requires grad, and autograd would not notice that it is overwritten; "
                    "pass a detached tensor, or call it under torch.no_grad()"
                )
    try:
        OVERLOADS[name + "_out"](*args, **outs)
    except (RuntimeError, ValueError) as error:
        raise original(error) from None
    torch.autograd.graph.increment_version(tuple(outs.values()))
