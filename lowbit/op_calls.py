"""Calls of ``torch.ops.lowbit.*``, with errors of their own type.

The CPU's kernels are C++ and pass on to Python what they do not serve (csrc/ops_entry.h). An error that Python raises
there comes back through C++ as its text: a ValueError or RuntimeError for whoever calls the op itself. Here the
original is raised in its place.
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
    """The error of the last call that C++ passed on, and that failed in Python."""

    error: BaseException | None = None


_failure = _Failure()


def failed(error: BaseException) -> None:
    """Note what was raised in Python, below C++."""
    _failure.error = error


def original(error: Exception) -> BaseException:
    """What was raised in Python, if ``error`` is its text come back through C++; else ``error`` itself."""
    own, _failure.error = _failure.error, None
    return own if own is not None and str(own) == str(error) else error


#: The overload of every op by its name; lowbit.backends.dispatch fills it.
OVERLOADS: dict[str, Callable[..., Any]] = {}


def call(name: str, *args: Any) -> Any:
    """``torch.ops.lowbit.NAME(*args)``; without grad mode, straight below autograd, whose kernels are Python."""
    try:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return OVERLOADS[name](*args)
        with below_autograd():
            return OVERLOADS[name](*args)
    except (RuntimeError, ValueError) as error:
        raise original(error) from None


def fill(name: str, *args: Any, **outs: Tensor) -> None:
    """``torch.ops.lowbit.NAME_out``: fills ``outs`` and raises their version, so that backward sees what was lost.

    Raises RuntimeError for an output that requires grad.
    """
    if torch.is_grad_enabled():
        for label, out in outs.items():
            if out.requires_grad:
                raise RuntimeError(
                    f"lowbit.{name}: {label} requires grad, and autograd would miss that it is overwritten; "
                    "give a detached tensor, or work under torch.no_grad()"
                )
    try:
        OVERLOADS[name + "_out"](*args, **outs)
    except (RuntimeError, ValueError) as error:
        raise original(error) from None
    torch.autograd.graph.increment_version(tuple(outs.values()))
