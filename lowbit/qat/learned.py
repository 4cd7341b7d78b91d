"""Learned scales: fp32 parameters for the scales that a scheme stores, and the gradient of that conversion.

A scheme's scales are floating-point numbers, powers of two, or FP8 numbers with a global scale. Training needs a
floating-point parameter for each kind, and quantization needs the stored form. The gradient passes straight through.

Source: docs/numerics.md section 12; LSQ, arXiv 1902.08153; LSQ+, arXiv 2004.09576; learned powers of two, TQT, arXiv
1903.08066.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.formats import find
from lowbit.functional import decode, encode
from lowbit.reference import of_blocks
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Scales, scale_dtype, zero_dtype

__all__ = ["Learned", "gradient_scale"]


class _Kind(NamedTuple):
    """Conversions for one scale format.

    Attributes:
        raw: ``raw(stored)``: the parameter for stored scales.
        stored: ``stored(raw, dtype)``: the scales to store for a parameter.
        slope: ``slope(raw)``: derivative of the scale, without the global scale, with respect to its parameter.
    """

    raw: Callable[[Tensor], Tensor]
    stored: Callable[[Tensor, torch.dtype], Tensor]
    slope: Callable[[Tensor], Tensor | float]


def _rounded(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest finite and normal number of ``dtype``, which is safe to divide by."""
    limits = torch.finfo(dtype)
    return raw.abs().clamp(limits.tiny, limits.max).copysign(raw).to(dtype)


def _exponent(raw: Tensor) -> Tensor:
    """The E8M0 exponents for binary logarithms."""
    return raw.round().clamp(-127, 127)


def _fp8(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8 codes of scales, at least the smallest subnormal, because a scale of 0 would get no gradient."""
    return encode(raw.abs().clamp(min=find("fp8_e4m3").min_subnormal).copysign(raw), "fp8_e4m3")


def _integer(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest scale of a superblock's block; at least 1, because a scale of 0 would get no gradient."""
    return raw.round().clamp(1, 63).to(dtype)


def _signed_integer(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``_integer`` for signed scales, of magnitude 1 at least."""
    return encode(raw.abs().round().clamp(1, 127).copysign(raw), "int8")


def _constant(raw: Tensor) -> Tensor:
    """The same fp32 numbers without a gradient.

    ``ExportedProgram.run_decompositions`` removes ``detach`` from an exported graph, but not a view of the bits.
    """
    if torch.compiler.is_exporting():
        return raw.view(torch.int32).view(torch.float32)
    return raw.detach()


#: Conversions by scale format. Parameters for E8M0 are binary logarithms.
_NUMBER = _Kind(lambda stored: stored.float(), _rounded, lambda raw: 1.0)
_KINDS: dict[str, _Kind] = {
    "fp32": _NUMBER,
    "bf16": _NUMBER,
    "fp16": _NUMBER,
    "e8m0": _Kind(
        lambda stored: stored.float() - 127.0,
        lambda raw, dtype: (_exponent(raw) + 127.0).to(torch.uint8),
        lambda raw: torch.exp2(_exponent(raw)) * math.log(2.0),
    ),
    "fp8_e4m3": _Kind(lambda stored: decode(stored, "fp8_e4m3"), _fp8, lambda raw: 1.0),
    "uint6": _Kind(lambda stored: stored.float(), _integer, lambda raw: 1.0),
    "int8": _Kind(lambda stored: decode(stored, "int8"), _signed_integer, lambda raw: 1.0),
}


def _minimum(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Minima as they are stored: finite numbers, or the integers of superblocks."""
    if not dtype.is_floating_point:
        return raw.round().clamp(0, 63).to(dtype)
    return raw.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)


class Learned(NamedTuple):
    """The learned numbers of one tensor: scales, zero points or minima, fp32 ``[R, C]``; its constant global scale."""

    scale: Tensor
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None

    @classmethod
    def of(cls, scales: Scales, scheme: Scheme) -> Learned:
        """The learned numbers that represent ``scales``."""
        zero = None if scales.zero_point is None else scales.zero_point.float()
        return cls(_KINDS[scheme.scale_format.name].raw(scales.scale).clone(), zero, scales.global_scale)

    def scales(self, scheme: Scheme) -> Scales:
        """The scales and zero points as ``scheme`` stores them."""
        stored = _KINDS[scheme.scale_format.name].stored(_constant(self.scale), scale_dtype(scheme))
        zero = self.zero_point
        if zero is not None and scheme.minimum:
            zero = _minimum(_constant(zero), scale_dtype(scheme))
        elif zero is not None:
            zero = _constant(zero).round().clamp(scheme.format.qmin, scheme.format.qmax).to(zero_dtype(scheme))
        return Scales(stored, zero, self.global_scale)

    def gradients(self, scheme: Scheme, grad: Tensor, factor: float) -> tuple[Tensor, Tensor | None]:
        """The gradients of the learned numbers from the result of ``fake_quantize_backward``, times ``factor``."""
        of_scale, of_zero = (grad[0], grad[1]) if scheme.affine else (grad, None)
        of_scale = of_scale * _KINDS[scheme.scale_format.name].slope(self.scale)
        if self.global_scale is not None and scheme.superblocks:
            unit, unit_of_minimum = of_blocks(self.global_scale, scheme, of_scale.shape[1])
            of_scale, of_zero = of_scale * unit, None if of_zero is None else of_zero * -unit_of_minimum
        elif self.global_scale is not None:
            of_scale = of_scale * self.global_scale
        return of_scale * factor, None if of_zero is None else of_zero * factor


def gradient_scale(scheme: Scheme, rows: int, cols: int) -> float:
    """LSQ's factor on the gradient of a scale that ``rows x cols`` elements share: ``1 / sqrt(N * Qp)``.

    Qp is the format's largest number; for affine schemes, the format's range.
    """
    height, width = (min(a, b) for a, b in zip(scheme.block_of(rows, cols), (rows, cols), strict=True))
    format = scheme.format
    largest = float(format.qmax - format.qmin) if scheme.affine else format.max
    return 1.0 / math.sqrt(max(height * width, 1) * largest)
