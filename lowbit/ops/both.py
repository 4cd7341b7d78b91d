"""quantize_both: a matrix in two schemes, as two products of a training step multiply it.

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
    """``x`` float ``[rows, cols]`` in ``scheme``, and in ``other`` after ``signed_hadamard`` along its rows in blocks
    of ``block``; 1: as it is. Global scales are made. ``rng`` is of both; each has its rounding and its stream.
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


def halves(call: QuantizeBoth) -> tuple[Quantize, Quantize]:
    """The two calls that it stands for, of ``x`` as it is and without global scales."""
    return (
        Quantize(call.x, call.scheme, None, call.rounding, call.rng, call.stream),
        Quantize(call.x, call.other, None, call.other_rounding, call.rng, call.other_stream),
    )


def _outputs(call: QuantizeBoth) -> list[Out]:
    rows, cols = call.x.shape
    made: list[Out] = []
    for half in halves(call):
        scheme = scaling.scheme(half.scheme)
        above = scheme.global_scale_shape(rows) if scheme.global_scale else (0,)
        made += [
            ((rows, scheme.packed_cols(cols)), torch.uint8),
            (scheme.scale_shape(rows, cols), scale_dtype(scheme)),
            (above, torch.float32),
        ]
    return made


def _check(call: QuantizeBoth) -> None:
    require_float("quantize_both", "x", call.x)
    require(call.x.dim() == 2, f"lowbit.quantize_both: x must be a matrix [rows, cols], got {list(call.x.shape)}")
    for half in halves(call):
        require_rounding("quantize_both", half)
        affine = scaling.scheme(half.scheme).affine
        require(not affine, f"lowbit.quantize_both: {half.scheme} has zero points; quantize by it alone")
    block = call.block
    require(
        0 < block <= 128 and block & (block - 1) == 0,
        f"lowbit.quantize_both: block must be a power of two up to 128, got {block}",
    )


def _cost(call: QuantizeBoth) -> Cost:
    stored = sum(scaling.scheme(half.scheme).nbytes(tuple(call.x.shape)) for half in halves(call))
    return Cost(0, call.x.numel() * call.x.element_size() + stored)


SPECS = (
    OpSpec(
        "quantize_both", QuantizeBoth,
        ("codes", "scale", "global_scale", "other_codes", "other_scale", "other_global_scale"),
        _outputs, _check, _cost,
    ),
)  # fmt: skip
