"""Warnings that point at the line outside of lowbit that caused them."""

from __future__ import annotations

import os
import sys
import warnings

import torch

__all__ = ["warn"]

#: Folders of lowbit, and of torch for its decorators around lowbit's functions (``no_grad``).
_INSIDE = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))


def warn(message: str) -> None:
    """Issues a UserWarning for the innermost line outside of lowbit and torch."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
