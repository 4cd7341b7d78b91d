"""Half-quadratic quantization: zero points that make the error sparse. No data is needed.

Source: Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.
"""

from __future__ import annotations

from torch import Tensor

from lowbit.calibrate import scales
from lowbit.calibrate.statistics import Statistics
from lowbit.functional import quantize
from lowbit.reference import in_blocks, spread
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["solve", "unfit"]

#: The norm, the penalty of the splitting and its growth, and how many rounds: the publication's.
_P, _BETA, _KAPPA, _ROUNDS = 0.7, 10.0, 1.01, 20


def unfit(scheme: Scheme) -> str | None:
    """Why the method has nothing to offer for a scheme."""
    return None if scheme.affine else f"{scheme} has no zero points; add ':affine' to an unsigned integer format"


def solve(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None) -> Quantized:
    """The zero point of each block by half-quadratic splitting, then rounded: lowbit's are integers.

    The zero point that has the least error so far, in the same norm, is kept.
    """
    first = scales.nearest(weight, scheme)
    assert first.zero_point is not None
    rows, cols = weight.shape
    block, format = scheme.block_of(rows, cols), scheme.format

    def wide(of: Tensor) -> Tensor:
        return spread(of, block, rows, cols)

    def total(of: Tensor) -> Tensor:
        return in_blocks(of, scheme).sum((1, 3))

    scale, zero, beta = first.scale.float(), first.zero_point.float(), _BETA
    steps, count = wide(scale), total(weight.new_ones(rows, cols))
    best, least = zero.round(), None
    for _ in range(_ROUNDS):
        codes = (weight / steps + wide(zero)).round().clamp(format.qmin, format.qmax)
        wrong = weight - (codes - wide(zero)) * steps
        rounded = zero.round().clamp(format.qmin, format.qmax)
        loss = total((weight - quantize(weight, scheme, first.scale, _stored(rounded, first)).dequantize()).abs() ** _P)
        less = None if least is None else loss < least
        best = rounded if less is None else rounded.where(less, best)
        least = loss if least is None or less is None else loss.where(less, least)
        magnitude = wrong.abs()
        sparse = wrong.sign() * (magnitude - magnitude.clamp(min=1e-12) ** (_P - 1) / beta).clamp(min=0)
        zero = total(codes - (weight - sparse) / steps) / count
        beta *= _KAPPA
    return quantize(weight, scheme, first.scale, _stored(best, first))


def _stored(zero: Tensor, like: scales.Scales) -> Tensor:
    assert like.zero_point is not None
    return zero.to(like.zero_point.dtype)
