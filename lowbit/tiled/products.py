"""Matmuls of tiles, with sums in fp32 or better."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

__all__ = ["TILE", "product", "slices", "sum_dtype"]

#: Default number of elements in a tile: 16 MiB in fp32.
TILE = 1 << 22


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over ``dtype``: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: Tensor, b: Tensor, dtype: torch.dtype, rounded: bool = False) -> Tensor:
    """Return ``a @ b`` (``[..., m, k]`` by ``[..., k, n]``, equal leading sizes) in ``sum_dtype(dtype)``.

    On CUDA, 16-bit matmuls run in ``dtype``; an fp32 operand is rounded to it, like gradients of autograd. Elsewhere
    the operands are cast to fp32, or with ``rounded`` to ``dtype``, to which the result is then rounded too.
    """
    out = sum_dtype(dtype)
    if a.is_cuda and dtype.itemsize < out.itemsize:
        left, right = a.to(dtype).flatten(0, -3), b.to(dtype).flatten(0, -3)
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        return multiply(left, right, out_dtype=out).view(*a.shape[:-1], b.shape[-1])
    operands = dtype if rounded else out
    return torch.matmul(a.to(operands), b.to(operands)).to(out)


def slices(start: int, stop: int, step: int) -> Iterator[slice]:
    """Cut a range into slices of ``step``; the last may be shorter."""
    return (slice(at, min(at + step, stop)) for at in range(start, stop, step))
