"""Matrix products of the tiles that a function holds at a time, with sums in fp32 or better."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["TILE", "product", "sum_dtype"]

#: Numbers in a tile where a caller does not say: 16 MiB in fp32.
TILE = 1 << 22


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums over numbers of ``dtype`` are kept in: fp64 of fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a: Tensor, b: Tensor, dtype: torch.dtype, rounded: bool = False) -> Tensor:
    """``a @ b`` (``[..., m, k]`` by ``[..., k, n]``, the same leading sizes) in ``sum_dtype(dtype)``.

    On CUDA operands of half precision are multiplied in it, and one in fp32 is rounded to it, as autograd's gradients
    are. Elsewhere they are multiplied in fp32, or with ``rounded`` in ``dtype``, to which the result is rounded too.
    """
    out = sum_dtype(dtype)
    if a.is_cuda and dtype.itemsize < out.itemsize:
        left, right = a.to(dtype).flatten(0, -3), b.to(dtype).flatten(0, -3)
        multiply = torch.mm if a.dim() == 2 else torch.bmm
        return multiply(left, right, out_dtype=out).view(*a.shape[:-1], b.shape[-1])
    operands = dtype if rounded else out
    return torch.matmul(a.to(operands), b.to(operands)).to(out)
