"""The block Hadamard transform: a rotation that spreads what sticks out over its block. docs/numerics.md section 13."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowbit import reference
from lowbit.autograd import transformed
from lowbit.op_calls import call
from lowbit.ops.spec import FLOATS

__all__ = ["by_kernel", "hadamard", "signed_hadamard"]

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
        if by_kernel(x):
            flat = x.reshape(-1, x.shape[-1])
            return cast(Tensor, _OnGPU.apply(flat, block, 1)).view(x.shape)  # type: ignore[no-untyped-call]
        return reference.hadamard(x, block)
    if dim != 0 or x.dim() != 2:
        raise ValueError(f"hadamard: dim must be the last axis, or 0 of a matrix; got {dim} of {list(x.shape)}")
    if by_kernel(x):
        return cast(Tensor, _OnGPU.apply(x, block, 0))  # type: ignore[no-untyped-call]
    if torch.compiler.is_compiling() or transformed() or (x.requires_grad and torch.is_grad_enabled()):
        return hadamard(x.t(), block).t()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start, length, size in reference.pieces(x.shape[0], block):
        _transform_rows(x[start : start + length], size, out[start : start + length])
    return out


def signed_hadamard(x: Tensor, block: int, dim: int = -1) -> Tensor:
    """``hadamard`` of ``x`` whose elements have been multiplied by the fixed signs of their places in a block.

    Products of two operands so transformed are those of the plain ones. Signs break what the transform would keep in
    one element: a block whose elements are equal. ``block``: at most 128. Source: arXiv 2509.25149, section 4.2.
    """
    if by_kernel(x) and x.dim() == 2 and not (x.requires_grad and torch.is_grad_enabled()):
        return cast(Tensor, call("hadamard", x, block, dim % 2, True))
    count, by_row = x.shape[dim], dim == 0 and x.dim() == 2
    signs = reference.signs(x, count, block)
    return hadamard(x * (signs[:, None] if by_row else signs), block, dim)


class _OnGPU(torch.autograd.Function):
    """The op. The matrix is symmetric, so that the gradient is transformed as ``x`` is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: int, axis: int) -> Tensor:
        ctx.block, ctx.axis = block, axis
        return cast(Tensor, call("hadamard", x, block, axis))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _OnGPU.apply(grad, ctx.block, ctx.axis), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *rest: None) -> Tensor:
        return cast(Tensor, _OnGPU.apply(tangent, ctx.block, ctx.axis))  # type: ignore[no-untyped-call]


def by_kernel(x: Tensor) -> bool:
    """Whether the op transforms ``x``: on GPUs, for which torch.compile and torch.func do not know it."""
    return x.is_cuda and x.dtype in FLOATS and not torch.compiler.is_compiling() and not transformed()


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
