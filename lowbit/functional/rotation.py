"""The block Hadamard transform: a rotation that spreads what sticks out over its block. docs/numerics.md section 13."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["hadamard", "signed_hadamard"]

#: The first 128 bits of the fraction of pi, which stand for signs that no data has chosen.
_PI = 0x243F6A8885A308D313198A2E03707344
_SIGNS = tuple(-1.0 if _PI >> (127 - i) & 1 else 1.0 for i in range(128))


def hadamard(x: Tensor, block: int) -> Tensor:
    """``x`` times the normalized Hadamard matrix of ``block``, in each block of ``block`` elements of its last axis.

    ``x``: float ``[..., K]``; the result has its shape and dtype. The transform is its own inverse, up to rounding, and
    products of two transformed operands are those of the plain ones. Where K is no multiple of ``block``, the rest is
    transformed in blocks of the powers of two that it is the sum of, the largest first.
    Computed in fp32, in one order of additions, so that bits are the same on every device and inside torch.compile.
    Raises ValueError for a ``block`` that is no power of two; TypeError for what is no float tensor.
    Source: Tseng et al., QuIP#, arXiv 2402.04396; in blocks: arXiv 2509.23202.
    """
    if not isinstance(block, int) or block < 1 or block & (block - 1):
        raise ValueError(f"hadamard: block must be a power of two, got {block!r}")
    if not x.is_floating_point() or x.dim() == 0:
        raise TypeError(f"hadamard: expected a float tensor [..., K], got {x.dtype} {list(x.shape)}")
    parts = [_transformed(x[..., start : start + length], size) for start, length, size in _pieces(x.shape[-1], block)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1) if parts else x


def signed_hadamard(x: Tensor, block: int) -> Tensor:
    """``hadamard`` of ``x [..., K]`` whose elements have been multiplied by the fixed signs of their places in a block.

    Products of two operands so transformed are those of the plain ones. Signs break what the transform would keep in
    one element: a block whose elements are equal. ``block``: at most 128. Source: arXiv 2509.25149, section 4.2.
    """
    repeated = torch.tensor(_SIGNS[:block], dtype=x.dtype, device=x.device).repeat(-(-x.shape[-1] // block))
    return hadamard(x * repeated[: x.shape[-1]], block)


def _pieces(cols: int, block: int) -> Iterator[tuple[int, int, int]]:
    """Where a run of equal blocks begins, how long it is, and the size of its blocks."""
    start, size = 0, block
    while start < cols:
        length = (cols - start) // size * size
        if length:
            yield start, length, size
        start, size = start + length, size // 2


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
