"""The block Hadamard transform. Source: docs/numerics.md section 13."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["PI", "hadamard", "pieces", "signs"]

#: The first 128 bits of the fraction of pi, which stand for signs that no data has chosen.
PI = 0x243F6A8885A308D313198A2E03707344
_SIGNS = tuple(-1.0 if PI >> (127 - i) & 1 else 1.0 for i in range(128))


def signs(x: Tensor, count: int, block: int) -> Tensor:
    """The signs of ``count`` elements in blocks of ``block``, in the dtype of ``x`` and where it lies."""
    return torch.tensor(_SIGNS[:block], dtype=x.dtype, device=x.device).repeat(-(-count // block))[:count]


def pieces(cols: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Where a run of equal blocks begins, how long it is, and the size of its blocks."""
    start, size = 0, block
    while start < cols:
        length = (cols - start) // size * size
        if length:
            yield start, length, size
        start, size = start + length, size // 2


def hadamard(x: Tensor, block: int) -> Tensor:
    """``x [..., K]`` transformed in blocks along its last axis."""
    made = [_transformed(x[..., start : start + length], size) for start, length, size in pieces(x.shape[-1], block)]
    return made[0] if len(made) == 1 else torch.cat(made, -1) if made else x


def _transformed(x: Tensor, size: int) -> Tensor:
    """Every run of ``size`` elements: ``log2(size)`` rounds of sums and differences, then one multiplication."""
    y = x.float()
    half = 1
    while half < size:
        pairs = y.unflatten(-1, (-1, 2, half))
        above, below = pairs.unbind(-2)
        y = torch.stack((above + below, above - below), -2).flatten(-3)
        half *= 2
    rotated: Tensor = (y * size**-0.5).to(x.dtype)
    return rotated
