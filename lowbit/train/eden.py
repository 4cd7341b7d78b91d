"""MS-EDEN: codes to nearest of a vector that random signs and a Hadamard transform have turned, whose scales make the
inner product with the vector what it was, and are rounded stochastically.

Source: Panferov et al., Quartet II, arXiv 2601.22813; docs/numerics.md section 14.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lowbit.functional import decode, encode, hadamard, quantize
from lowbit.recipes.cast import EDEN_BLOCK
from lowbit.rounding import Rounding
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized
from lowbit.train.rules import ROOM, block_sums

__all__ = ["corrected", "random_hadamard", "random_signs"]


def random_signs(rounding: Rounding, device: torch.device) -> Tensor:
    """fp32 ``[EDEN_BLOCK]`` of -1 and 1: what a half is rounded to, 1 or 0."""
    half = torch.full((1, EDEN_BLOCK), 0.5, device=device)
    ones = quantize(half, "int8:tensor", 1.0, rounding=rounding).dequantize(torch.float32)
    return (1.0 - 2.0 * ones).reshape(EDEN_BLOCK)


def random_hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """``x [rows, cols]`` with zeros behind its rows, to whole vectors, each times ``signs`` and transformed."""
    whole = pad(x, (0, -x.shape[-1] % EDEN_BLOCK))
    turned = whole.unflatten(-1, (-1, EDEN_BLOCK)) * signs.to(x.dtype)
    return hadamard(turned.flatten(-2), EDEN_BLOCK)


def corrected(x: Tensor, scheme: Scheme, rounding: Rounding) -> Quantized:
    """``x``, which has been turned, in ``scheme``: E4M3 scales of 16 along the axis of the vectors.

    A vector's factor is ``sum x^2 / sum x Q(x)``. NaN of a block stays in its scale.
    """
    along = 0 if scheme.block[1] == 1 else 1
    above = quantize(x, scheme).global_scale
    assert above is not None
    made = quantize(x, scheme, global_scale=above * ROOM)
    exact = x.float()
    vectors = (EDEN_BLOCK, 1) if along == 0 else (1, EDEN_BLOCK)
    square = block_sums(exact * exact, vectors)
    cross = block_sums(exact * made.dequantize(torch.float32), vectors)
    factor = torch.where(cross > 0, square / cross, torch.ones_like(cross))
    if factor.numel():
        factor = factor.repeat_interleave(made.scale.shape[along] // factor.shape[along], along)
    scale = encode(decode(made.scale, scheme.scale_format.name) * factor, scheme.scale_format.name, rounding=rounding)
    return Quantized(made.codes, scale, None, made.global_scale, scheme, made.shape, made.dtype)
