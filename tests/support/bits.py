"""Comparison in every bit, with messages that show where and how two results differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

_VIEWS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def pattern(x: Tensor) -> Tensor:
    """The bits of ``x`` as non-negative int64."""
    width = x.element_size()
    x = x.detach().cpu().contiguous()
    if not x.numel():
        return torch.zeros(x.shape, dtype=torch.int64)
    return x.view(_VIEWS[width]).long() & ((1 << 8 * width) - 1 if width < 8 else -1)


def assert_same_bits(
    actual: Tensor, expected: Tensor | np.ndarray, what: str = "", source: Tensor | None = None
) -> None:
    """Fails unless shape, dtype and every bit agree; shows the first differences, with the input element if given."""
    if isinstance(expected, np.ndarray):
        expected = torch.from_numpy(expected)
    else:
        assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype}, expected {expected.dtype}"
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: {list(actual.shape)}, expected {list(expected.shape)}"
    )
    if actual.device == expected.device and same_bits(actual, expected):
        return
    a, e = pattern(actual), pattern(expected) if expected.dtype != torch.int64 else expected
    wrong = (a != e).nonzero()
    if len(wrong):
        raise AssertionError(
            f"{what}: {len(wrong)} of {a.numel()} elements differ\n" + _show(wrong, actual, a, e, source)
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits (so NaN equals itself and -0 differs from 0)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.detach().contiguous(), b.detach().contiguous()
    view = _VIEWS[a.element_size()]
    return torch.equal(a.view(view), b.view(view)) if a.numel() else True


def _show(wrong: Tensor, actual: Tensor, a: Tensor, e: Tensor, source: Tensor | None) -> str:
    digits = 2 * actual.element_size()
    lines = []
    for where in wrong[:6].tolist():
        at = tuple(where)
        line = f"  at {where}: {a[at]:#0{digits + 2}x} ({actual[at].item()}), expected {e[at]:#0{digits + 2}x}"
        if source is not None:
            line += f", from {source[at].item()!r} ({pattern(source)[at]:#x})"
        lines.append(line)
    return "\n".join(lines)


def describe(call: Any) -> str:
    """A call's arguments on one line, tensors by shape."""
    words = []
    for name, value in zip(call._fields, call, strict=True):
        if isinstance(value, Tensor):
            value = f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} strides {value.stride()}"
        words.append(f"{name}={value}")
    return ", ".join(words)
