"""The public functions on tensors: codecs, quantization, products, an optimizer's step, and which kernel would run.

Shapes: a tensor of any rank is seen as ``[rows, cols]``, cols its last axis; scales are
``[ceil(rows/r), ceil(cols/c)]`` for blocks ``(r, c)``.
A scale is the multiplier that decodes; encoding divides by it in fp32.
Source: docs/numerics.md.
"""

from __future__ import annotations

from lowbit.functional.codec import decode, encode, pack, unpack
from lowbit.functional.explanation import explain
from lowbit.functional.layers import linear
from lowbit.functional.matmul import scaled_mm
from lowbit.functional.optim import adamw_
from lowbit.functional.quantizers import fake_quantize, quantize
from lowbit.functional.rotation import hadamard

__all__ = [
    "adamw_", "decode", "encode", "explain", "fake_quantize", "hadamard", "linear", "pack", "quantize", "scaled_mm",
    "unpack",
]  # fmt: skip
