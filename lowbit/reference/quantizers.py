"""Reference of quantize, dequantize and the gradient of fake_quantize (sections 3, 5, 6, 10)."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.reference.codec import (
    Rng,
    cast,
    decode,
    encode,
    require_subnormals,
)
from lowbit.reference.scales import block_scales, in_blocks, minimum_value, quotient, scale_value, spread
from lowbit.scaling import Scheme


def divide(x: Tensor, scale: Tensor, scheme: Scheme) -> Tensor:
    """``x [rows, cols]`` divided by the scales ``[R, C]`` of its blocks."""
    return quotient(x, spread(scale, scheme.block_of(*x.shape), *x.shape))


def above_minimum(x: Tensor, scheme: Scheme, minimum: Tensor | None, global_scale: Tensor | None) -> Tensor:
    """``x [rows, cols]`` less the minimum of each block, fp32."""
    assert minimum is not None
    return x.float() - spread(minimum_value(minimum, scheme, global_scale), scheme.block_of(*x.shape), *x.shape)


def quantize_static(
    x: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, global_scale: Tensor | None, rng: Rng | None
) -> Tensor:
    """Codes ``[rows, cols]``, one per byte, of ``x`` with static scales."""
    require_subnormals(x)
    zero = None if zero_point is None else spread(zero_point, scheme.block_of(*x.shape), *x.shape)
    if scheme.minimum:
        x, zero = above_minimum(x, scheme, zero_point, global_scale), None
    return encode(divide(x, scale_value(scale, scheme, global_scale), scheme), scheme.format, rng, True, zero)


def quantize(
    x: Tensor, scheme: Scheme, global_scale: Tensor | None, rng: Rng | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Codes ``[rows, cols]``, one per byte, scales and zero points of ``x``. Inf or NaN in a block: canonical codes."""
    require_subnormals(x)
    scale, zero_point = block_scales(x, scheme, global_scale)
    codes = quantize_static(x, scheme, scale, zero_point, global_scale, rng)
    broken = spread(scale_value(scale, scheme, global_scale).isnan(), scheme.block_of(*x.shape), *x.shape)
    format = scheme.format
    canonical = {
        "integer": 0,
        "codebook": format.zero_code,
        "float": format.nan_code if format.has_nan else format.max_code,
    }
    return codes.masked_fill(broken, canonical[format.kind]), scale, zero_point


def dequantize(
    codes: Tensor,
    scheme: Scheme,
    scale: Tensor,
    zero_point: Tensor | None,
    global_scale: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Code value times scale in fp32, then one rounding to ``dtype``; ``codes [rows, cols]``, one per byte.

    A minimum is added to the rounded product.
    """
    require_subnormals(scale)
    block = scheme.block_of(*codes.shape)
    value = decode(codes, scheme.format)
    if zero_point is not None and not scheme.minimum:
        value = value - spread(zero_point.float(), block, *codes.shape)
    value = value * spread(scale_value(scale, scheme, global_scale), block, *codes.shape)
    if zero_point is not None and scheme.minimum:
        value = value + spread(minimum_value(zero_point, scheme, global_scale), block, *codes.shape)
    return cast(value, dtype)


def fake_quantize_backward(
    grad: Tensor, x: Tensor, scheme: Scheme, scale: Tensor, zero_point: Tensor | None, global_scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Straight-through gradient of ``x``, and LSQ gradient of the scales (arXiv 1902.08153), fp32 ``[R, C]``.

    With zero points or minima the second is ``[2, R, C]``: scales, then these (LSQ+, arXiv 2004.09576).
    """
    block, format = scheme.block_of(*x.shape), scheme.format
    step = scale_value(scale, scheme, global_scale)
    v = divide(above_minimum(x, scheme, zero_point, global_scale) if scheme.minimum else x, step, scheme)
    zero = torch.zeros_like(v)
    if zero_point is not None and not scheme.minimum:
        zero = spread(zero_point.float(), block, *x.shape)
    if format.kind == "integer":
        kept = (v.round() + zero >= format.qmin) & (v.round() + zero <= format.qmax)
    else:
        kept = v.abs() <= format.max
    level = decode(encode(v, format, None, True, zero), format) - zero
    slope = torch.where(kept, level - v, level) * grad.float()
    grad_scale = in_blocks(slope, scheme).sum((1, 3))
    if zero_point is not None:
        moved = grad.float() if scheme.minimum else -spread(step, block, *x.shape) * grad.float()
        moved = torch.where(kept, 0.0, moved)
        grad_scale = torch.stack([grad_scale, in_blocks(moved, scheme).sum((1, 3))])
    return grad.where(kept, 0.0), grad_scale
