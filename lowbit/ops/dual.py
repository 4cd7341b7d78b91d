"""The op quantize_both: a matrix in two schemes, for two matmuls of a training step (dual quantization).

Source: docs/numerics.md sections 3, 5, 7 and 13.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lowbit import scaling
from lowbit.ops.quantize import Quantize
from lowbit.ops.spec import Cost, OpSpec, Out, require, require_float, require_rounding
from lowbit.tensor.quantized import scale_dtype


class QuantizeBoth(NamedTuple):
    """``x`` float ``[rows, cols]`` in ``scheme``, and in ``other`` after ``signed_hadamard`` along its rows.

    ``block`` is the transform's; 1 means no transform. Global scales are computed from ``x``. The schemes share
    ``rng`` and have a rounding and a stream each.
    """

    x: Tensor
    scheme: str
    other: str
    block: int = 1
    rounding: str = "nearest"
    other_rounding: str = "nearest"
    rng: Tensor | None = None
    stream: int = 0
    other_stream: int = 0


def quantize_calls(call: QuantizeBoth) -> tuple[Quantize, Quantize]:
    """The equivalent two calls of ``quantize``, without the transform and the global scales."""
    return (
        Quantize(call.x, call.scheme, None, call.rounding, call.rng, call.stream),
        Quantize(call.x, call.other, None, call.other_rounding, call.rng, call.other_stream),
    )


def _outputs(call: QuantizeBoth) -> list[Out]:
    rows, cols = call.x.shape
    outs: list[Out] = []
    for single in quantize_calls(call):
        scheme = scaling.scheme(single.scheme)
        global_shape = scheme.global_scale_shape(rows, cols) if scheme.global_scale else (0,)
        outs += [
            ((rows, scheme.packed_cols(cols)), torch.uint8),
            (scheme.scale_shape(rows, cols), scale_dtype(scheme)),
            (global_shape, torch.float32),
        ]
    return outs


def _check(call: QuantizeBoth) -> None:
    require_float("quantize_both", "x", call.x)
    require(call.x.dim() == 2, f"lowbit.quantize_both: x must be a matrix [rows, cols], got {list(call.x.shape)}")
    for single in quantize_calls(call):
        require_rounding("quantize_both", single)
        affine = scaling.scheme(single.scheme).affine
        require(not affine, f"lowbit.quantize_both: {single.scheme} has zero points; call quantize for it")
    block = call.block
    require(
        0 < block <= 128 and block & (block - 1) == 0,
        f"lowbit.quantize_both: block must be a power of two up to 128, got {block}",
    )


def _cost(call: QuantizeBoth) -> Cost:
    stored = sum(scaling.scheme(single.scheme).nbytes(tuple(call.x.shape)) for single in quantize_calls(call))
    return Cost(0, call.x.numel() * call.x.element_size() + stored)


SPECS = (
    OpSpec(
        "quantize_both", QuantizeBoth,
        ("codes", "scale", "global_scale", "other_codes", "other_scale", "other_global_scale"),
        _outputs, _check, _cost,
    ),
)  # fmt: skip
