"""Methods that choose the scale of each block, and round every weight to its nearest code."""

from __future__ import annotations

from torch import Tensor

from lowbit.calibrate import scales
from lowbit.calibrate.statistics import Statistics
from lowbit.functional import quantize
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized

__all__ = ["mse", "nearest", "search", "signed", "unsigned"]


def nearest(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None) -> Quantized:
    """What ``quantize`` does."""
    return quantize(weight, scheme)


def unsigned(scheme: Scheme) -> str | None:
    """Why weights of a scheme have no use for scales of either sign."""
    if scheme.format.kind != "integer" or scheme.affine or scheme.scale_format.dtype == "uint8":
        return f"{scheme} is not of signed integers with floating-point scales"
    return None


def signed(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None) -> Quantized:
    """The element of largest magnitude of each block takes the least code, which has no positive counterpart."""
    return quantize(weight, scheme, *scales.signed(weight, scheme))


def mse(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None) -> Quantized:
    """The least squared error of the weights."""
    return quantize(weight, scheme, *scales.search(weight, scheme))


def search(weight: Tensor, scheme: Scheme, statistics: Statistics | None = None) -> Quantized:
    """The least squared error of the weights, weighted with E[x^2]."""
    importance = statistics.squares if statistics is not None and statistics.rows else None
    return quantize(weight, scheme, *scales.search(weight, scheme, importance))
