"""Block Hadamard transforms, which spread outliers over their block. Source: docs/numerics.md section 13."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lowbit import reference
from lowbit.autograd import transformed
from lowbit.op_calls import call
from lowbit.ops.spec import FLOATS

__all__ = ["by_kernel", "hadamard", "signed_hadamard"]

#: Elements that are transformed at a time, so that they stay in the cache.
_CACHED = 1 << 16


def hadamard(x: Tensor, block: int, dim: int = -1) -> Tensor:
    """Multiplies each block of ``block`` elements along an axis by the normalized Hadamard matrix.

    Up to rounding, the transform is its own inverse, and the matmul of two transformed operands equals the matmul of
    the originals. It is computed in fp32 with a fixed order of additions, so results are bit-identical on every device
    and under torch.compile.

    Args:
        x: Float ``[..., K]``.
        block: Power of two. If K is not a multiple of it, the rest is transformed in blocks of decreasing powers of
            two.
        dim: The last axis, or 0 of a matrix.

    Returns:
        A tensor with the shape and dtype of ``x``.

    Raises:
        ValueError: ``block`` is not a power of two, or ``dim`` is another axis.
        TypeError: ``x`` is not a float tensor.

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
    """``hadamard`` after multiplying each element by a fixed sign, which depends on its position in the block.

    Up to rounding, the matmul of two such operands equals the matmul of the originals. Without signs, a block of equal
    elements would become a single large element. ``block``: at most 128. Source: arXiv 2509.25149, section 4.2.
    """
    if by_kernel(x) and x.dim() == 2 and not (x.requires_grad and torch.is_grad_enabled()):
        return cast(Tensor, call("hadamard", x, block, dim % 2, True))
    count, by_row = x.shape[dim], dim == 0 and x.dim() == 2
    signs = reference.signs(x, count, block)
    return hadamard(x * (signs[:, None] if by_row else signs), block, dim)


class _OnGPU(torch.autograd.Function):
    """The op with its gradient: the matrix is symmetric, so the gradient is transformed like ``x``."""

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
    """Whether a GPU kernel is used for ``x``; torch.compile and torch.func do not support the op."""
    return x.is_cuda and x.dtype in FLOATS and not torch.compiler.is_compiling() and not transformed()


def _transform_rows(x: Tensor, size: int, out: Tensor) -> None:
    """Writes the transform of every ``size`` consecutive rows of ``x`` to ``out``."""
    cols = max(x.shape[1], 1)
    for rows, target in zip(*(t.split(max(_CACHED // cols // size, 1) * size) for t in (x, out)), strict=True):
        y = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        buffer = torch.empty_like(y)
        half = 1
        while half < size:
            above, below = y.unflatten(0, (-1, 2, half)).unbind(1)
            sums, differences = buffer.unflatten(0, (-1, 2, half)).unbind(1)
            torch.add(above, below, out=sums)
            torch.sub(above, below, out=differences)
            y, buffer, half = buffer, y, 2 * half
        target.copy_(y.mul_(size**-0.5))
