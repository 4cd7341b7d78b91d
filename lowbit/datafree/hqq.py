"""HQQ: scales and zero points by half-quadratic splitting, with a norm that is robust to outliers.

Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023. There zero points are
floating-point numbers and scales are fixed. lowbit's zero points are integers, so it fits the scales too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.datafree import scales
from lowbit.functional import fake_quantize, quantize
from lowbit.reference import in_blocks, spread
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized, Scales

__all__ = ["solve", "unfit"]

#: The exponent of the norm, the penalty of the splitting and its growth, and the number of rounds, as published.
_P, _BETA, _KAPPA, _ROUNDS = 0.7, 10.0, 1.01, 20


def unfit(scheme: Scheme) -> str | None:
    """Why the method does not support a scheme; None if it does."""
    if scheme.format.kind != "integer" or scheme.scale_format.dtype == "uint8" or scheme.minimum:
        return f"{scheme} does not have integers with floating-point scales, or has minima in place of zero points"
    return None


def solve(weight: Tensor, scheme: Scheme) -> Quantized:
    """Alternate between codes and outliers, and keep the scale of each block with the least norm."""
    rows, cols = weight.shape
    block = scheme.block_of(rows, cols)

    def norm(scales: Scales) -> Tensor:
        return in_blocks((weight - fake_quantize(weight, scheme, *scales)).abs() ** _P, scheme).sum((1, 3))

    best = current = scales.nearest(weight, scheme) if scheme.affine else scales.signed(weight, scheme)
    least, beta = norm(best), _BETA
    for _ in range(_ROUNDS):
        steps = spread(current.scale.float(), block, rows, cols)
        codes = fake_quantize(weight, scheme, *current) / steps  # without the zero point
        error = weight / steps - codes
        magnitude = error.abs()
        outliers = error.sign() * (magnitude - magnitude.clamp(min=1e-12) ** (_P - 1) / beta).clamp(min=0)
        current = _fitted(codes, weight - outliers * steps, current, scheme)
        loss = norm(current)
        less = loss < least
        zero = best.zero_point
        if zero is not None and current.zero_point is not None:
            zero = torch.where(less, current.zero_point, zero)
        best = best._replace(scale=torch.where(less, current.scale, best.scale), zero_point=zero)
        least, beta = torch.where(less, loss, least), beta * _KAPPA
    return quantize(weight, scheme, *best)


def _fitted(codes: Tensor, target: Tensor, current: Scales, scheme: Scheme) -> Scales:
    """The least-squares scales and zero points for ``target``. ``codes`` are without the zero points of ``current``."""

    def total(values: Tensor) -> Tensor:
        return in_blocks(values, scheme).sum((1, 3))

    rows, cols = codes.shape
    zero = current.zero_point
    if zero is not None:
        count, mean = total(torch.ones_like(codes)), total(codes)
        variance = total(codes.square()) - mean.square() / count
        slope = (total(codes * target) - mean * total(target) / count) / variance
        offset = (mean - total(target) / slope) / count  # of zero, in codes
        format = scheme.format
        new = (zero.float() + offset.nan_to_num(0, 0, 0)).round().clamp(format.qmin, format.qmax)
        codes = codes - spread(new - zero.float(), scheme.block_of(rows, cols), rows, cols)
        current = current._replace(zero_point=new.to(zero.dtype))
    return scales.rescaled(current, total(codes * target) / total(codes.square()))
