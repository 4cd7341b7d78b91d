"""Warnings that point at the caller's own line, however many functions of the package lie in between."""

from __future__ import annotations

import os
import sys
import warnings

import torch

__all__ = ["warn"]

#: Where functions of the package, and torch's decorators around them (``no_grad``), come from.
_INSIDE = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))


def warn(message: str) -> None:
    """A UserWarning of the line outside of lowbit (and torch) that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
