"""The numerics specification as simple, slow code for any device; other backends are bit-identical to it.

Bit patterns are int64, so that no step overflows. Real arithmetic is fp32, one rounding at a time. It only divides by
tensors, because on CUDA torch replaces a division by a Python number with a multiplication by its reciprocal.

Legend: ``rows, cols`` of the matrix; ``r, c`` of a block; ``R, C`` numbers of blocks.  Source: docs/numerics.md.
"""

from __future__ import annotations

from lowbit.reference.codec import (
    Rng,
    cast,
    decode,
    encode,
    encode_codebook,
    encode_magnitude,
    philox4x32,
    require_subnormals,
    to_bits,
    unpack,
)
from lowbit.reference.fused import rms_norm, rms_norm_backward, rotary, swiglu, swiglu_backward
from lowbit.reference.matmul import MIN_INTEGER_BLOCK, SEGMENT, Operand, integer_segments, scaled_mm
from lowbit.reference.optim import Moment, optimizer_step, split24, weight
from lowbit.reference.quantizers import dequantize, divide, fake_quantize_backward, quantize, quantize_static
from lowbit.reference.rotation import PI, hadamard, pieces, signs
from lowbit.reference.scales import (
    block_amax,
    block_range,
    block_scales,
    e8m0_code,
    global_scale,
    in_blocks,
    minimum_value,
    of_blocks,
    of_range,
    scale_value,
    spread,
)
from lowbit.reference.sums import square_sums

__all__ = [
    "MIN_INTEGER_BLOCK",
    "PI",
    "SEGMENT",
    "Moment",
    "Operand",
    "Rng",
    "block_amax",
    "block_range",
    "block_scales",
    "cast",
    "decode",
    "dequantize",
    "divide",
    "e8m0_code",
    "encode",
    "encode_codebook",
    "encode_magnitude",
    "fake_quantize_backward",
    "global_scale",
    "hadamard",
    "in_blocks",
    "integer_segments",
    "minimum_value",
    "of_blocks",
    "of_range",
    "optimizer_step",
    "philox4x32",
    "pieces",
    "quantize",
    "quantize_static",
    "require_subnormals",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "scale_value",
    "scaled_mm",
    "signs",
    "split24",
    "spread",
    "square_sums",
    "swiglu",
    "swiglu_backward",
    "to_bits",
    "unpack",
    "weight",
]  # fmt: skip
