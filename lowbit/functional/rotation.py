"""The block Hadamard transform: a rotation that spreads what sticks out over its block. docs/numerics.md section 13."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowbit.autograd import transformed

__all__ = ["hadamard", "signed_hadamard"]

#: The first 128 bits of the fraction of pi, which stand for signs that no data has chosen.
_PI = 0x243F6A8885A308D313198A2E03707344
_SIGNS = tuple(-1.0 if _PI >> (127 - i) & 1 else 1.0 for i in range(128))


#: Elements of the rows that are transformed at a time, which stay in a cache.
_CACHED = 1 << 16


def hadamard(x: Tensor, block: int, dim: int = -1) -> Tensor:
    """``x`` times the normalized Hadamard matrix of ``block``, in each block of ``block`` elements of an axis.

    ``x``: float ``[..., K]``; the result has its shape and dtype. ``dim``: the last axis, or 0 of a matrix. The
    transform is its own inverse, up to rounding, and products of two transformed operands are those of the plain ones.
    Where K is no multiple of ``block``, the rest is transformed in blocks of the powers of two that it is the sum of,
    the largest first. Computed in fp32, in one order of additions, so that bits are the same on every device and inside
    torch.compile.
    Raises ValueError for a ``block`` that is no power of two and for another axis; TypeError for what is no float
    tensor.
    Source: Tseng et al., QuIP#, arXiv 2402.04396; in blocks: arXiv 2509.23202.
    """
    if not isinstance(block, int) or block < 1 or block & (block - 1):
        raise ValueError(f"hadamard: block must be a power of two, got {block!r}")
    if not x.is_floating_point() or x.dim() == 0:
        raise TypeError(f"hadamard: expected a float tensor [..., K], got {x.dtype} {list(x.shape)}")
    if dim in (-1, x.dim() - 1):
        pieces = [
            _transformed(x[..., start : start + length], size) for start, length, size in _pieces(x.shape[-1], block)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, -1) if pieces else x
    if dim != 0 or x.dim() != 2:
        raise ValueError(f"hadamard: dim must be the last axis, or 0 of a matrix; got {dim} of {list(x.shape)}")
    if torch.compiler.is_compiling() or transformed() or (x.requires_grad and torch.is_grad_enabled()):
        return hadamard(x.t(), block).t()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start, length, size in _pieces(x.shape[0], block):
        _transform_rows(x[start : start + length], size, out[start : start + length])
    return out


def signed_hadamard(x: Tensor, block: int, dim: int = -1) -> Tensor:
    """``hadamard`` of ``x`` whose elements have been multiplied by the fixed signs of their places in a block.

    Products of two operands so transformed are those of the plain ones. Signs break what the transform would keep in
    one element: a block whose elements are equal. ``block``: at most 128. Source: arXiv 2509.25149, section 4.2.
    """
    count, by_row = x.shape[dim], dim == 0 and x.dim() == 2
    signs = torch.tensor(_SIGNS[:block], dtype=x.dtype, device=x.device).repeat(-(-count // block))[:count]
    return hadamard(x * (signs[:, None] if by_row else signs), block, dim)


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


def _transform_rows(x: Tensor, size: int, out: Tensor) -> None:
    """``out``: the same of every run of ``size`` rows of ``x``, some of them at a time."""
    cols = max(x.shape[1], 1)
    for rows, to in zip(*(t.split(max(_CACHED // cols // size, 1) * size) for t in (x, out)), strict=True):
        y = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        spare = torch.empty_like(y)
        half = 1
        while half < size:
            above, below = y.unflatten(0, (-1, 2, half)).unbind(1)
            sums, differences = spare.unflatten(0, (-1, 2, half)).unbind(1)
            torch.add(above, below, out=sums)
            torch.sub(above, below, out=differences)
            y, spare, half = spare, y, 2 * half
        to.copy_(y.mul_(size**-0.5))
