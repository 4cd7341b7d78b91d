"""MS-EDEN: rounding to nearest after random signs and a Hadamard transform, with stochastically rounded, corrected
scales.

The correction preserves the inner product of each vector with itself. Source: Panferov et al., Quartet II, arXiv
2601.22813; docs/numerics.md section 14.
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
    """fp32 ``[EDEN_BLOCK]`` of -1 and 1, from the random bits that round one half to 1 or 0."""
    half = torch.full((1, EDEN_BLOCK), 0.5, device=device)
    ones = quantize(half, "int8:tensor", 1.0, rounding=rounding).dequantize(torch.float32)
    return (1.0 - 2.0 * ones).reshape(EDEN_BLOCK)


def random_hadamard(x: Tensor, signs: Tensor) -> Tensor:
    """Pad the rows of ``x [rows, cols]`` with zeros to whole vectors, multiply each by ``signs`` and transform it."""
    padded = pad(x, (0, -x.shape[-1] % EDEN_BLOCK))
    signed = padded.unflatten(-1, (-1, EDEN_BLOCK)) * signs.to(x.dtype)
    return hadamard(signed.flatten(-2), EDEN_BLOCK)


def corrected(x: Tensor, scheme: Scheme, rounding: Rounding) -> Quantized:
    """Quantize the transformed ``x`` in ``scheme``: E4M3 scales of 16 elements along the axis of the vectors.

    A vector's factor is ``sum x^2 / sum x Q(x)``. NaN of a block stays in its scale.
    """
    along = 0 if scheme.block[1] == 1 else 1
    global_scale = quantize(x, scheme).global_scale
    assert global_scale is not None
    q = quantize(x, scheme, global_scale=global_scale * ROOM)
    exact = x.float()
    vectors = (EDEN_BLOCK, 1) if along == 0 else (1, EDEN_BLOCK)
    square = block_sums(exact * exact, vectors)
    cross = block_sums(exact * q.dequantize(torch.float32), vectors)
    factor = torch.where(cross > 0, square / cross, torch.ones_like(cross))
    if factor.numel():
        factor = factor.repeat_interleave(q.scale.shape[along] // factor.shape[along], along)
    scale = encode(decode(q.scale, scheme.scale_format.name) * factor, scheme.scale_format.name, rounding=rounding)
    return Quantized(q.codes, scale, None, q.global_scale, scheme, q.shape, q.dtype)
