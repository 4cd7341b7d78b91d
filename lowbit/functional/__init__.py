"""Public functions on tensors: codecs, quantization, matmuls, norms, gates, rotations, an AdamW step, and ``explain``.

A tensor of any rank is treated as ``[rows, cols]``; cols is its last axis. With blocks ``(r, c)`` the scales have
shape ``[ceil(rows/r), ceil(cols/c)]``. Decoding multiplies by the scale; encoding divides by it in fp32.
Source: docs/numerics.md.
"""

from __future__ import annotations

from lowbit.functional.codec import decode, encode, pack, unpack
from lowbit.functional.explanation import explain
from lowbit.functional.fused import rms_norm, rotary, swiglu
from lowbit.functional.layers import linear
from lowbit.functional.matmul import scaled_mm
from lowbit.functional.optim import adamw_
from lowbit.functional.quantizers import fake_quantize, quantize
from lowbit.functional.rotation import hadamard
from lowbit.functional.values import round_to

__all__ = [
    "adamw_", "decode", "encode", "explain", "fake_quantize", "hadamard", "linear", "pack", "quantize", "rms_norm",
    "rotary", "round_to", "scaled_mm", "swiglu", "unpack",
]  # fmt: skip
