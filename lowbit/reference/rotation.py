"""Reference of the block Hadamard transform. Source: docs/numerics.md section 13."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["PI", "hadamard", "pieces", "signs"]

#: The first 128 bits of the fraction of pi, as signs that do not depend on data.
PI = 0x243F6A8885A308D313198A2E03707344
_SIGNS = tuple(-1.0 if PI >> (127 - i) & 1 else 1.0 for i in range(128))


def signs(x: Tensor, count: int, block: int) -> Tensor:
    """The signs of ``count`` elements in blocks of ``block``, with the dtype and device of ``x``."""
    return torch.tensor(_SIGNS[:block], dtype=x.dtype, device=x.device).repeat(-(-count // block))[:count]


def pieces(cols: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Start, length and block size of each run of equal blocks."""
    start, size = 0, block
    while start < cols:
        length = (cols - start) // size * size
        if length:
            yield start, length, size
        start, size = start + length, size // 2


def hadamard(x: Tensor, block: int) -> Tensor:
    """``x [..., K]`` transformed in blocks along its last axis."""
    runs = [_transformed(x[..., start : start + length], size) for start, length, size in pieces(x.shape[-1], block)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, -1) if runs else x


def _transformed(x: Tensor, size: int) -> Tensor:
    """Each ``size`` elements: ``log2(size)`` rounds of sums and differences, then one multiplication."""
    y = x.float()
    half = 1
    while half < size:
        pairs = y.unflatten(-1, (-1, 2, half))
        above, below = pairs.unbind(-2)
        y = torch.stack((above + below, above - below), -2).flatten(-3)
        half *= 2
    rotated: Tensor = (y * size**-0.5).to(x.dtype)
    return rotated
