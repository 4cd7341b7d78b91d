"""What the tests of layers share: a product in fp64, and the bound that the OpSpec states for the kernel that runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lowbit as lb
from lowbit.ops import OPS
from lowbit.ops.matmul import ScaledMM
from lowbit.train import TrainLinear

TRAINING = tuple(name for name, row in lb.RECIPES.items() if row.trains)
#: Recipes whose scales are made of what is quantized, and those whose inputs have scales from calibration.
DYNAMIC = tuple(name for name, row in lb.RECIPES.items() if row.dynamic)
STATIC = tuple(name for name, row in lb.RECIPES.items() if row.static)


def training_layer(inputs: int, outputs: int, recipe: str | lb.Recipe) -> TrainLinear:
    """One TrainLinear, with the state that some recipes need."""
    layer = TrainLinear(inputs, outputs, recipe=recipe)
    lb.train.state(layer)
    return layer


def exact(a: Any, b: Any, bias: Tensor | None = None) -> Tensor:
    """``a @ b.T + bias`` in fp64 of what the operands decode to."""
    left, right = (x.double() if isinstance(x, Tensor) else x.dequantize(torch.float32).double() for x in (a, b))
    return left @ right.T + (0 if bias is None else bias.double())


def bound(a: Any, b: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """How far from ``exact`` the kernel that serves this product may be."""
    call = ScaledMM(*_sides(a, b), bias=bias, out_dtype=dtype)
    chosen = lb.explain("scaled_mm", a, b, bias=bias, out_dtype=dtype).chosen
    stated = OPS["scaled_mm"].tolerance(call, chosen.numerics)
    return stated if bool(stated.any()) else _rounding(a, b, bias, dtype)


def _rounding(a: Any, b: Any, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Integer products are the same on every kernel (stated tolerance 0); this is what scales, bias and cast lose.

    ``exact`` decodes each operand with one rounding, which the kernels do not; they round scale, product and sum.
    """
    size = exact(*(x.abs() if isinstance(x, Tensor) else x.dequantize(torch.float32).abs() for x in (a, b)))
    size = size + (0 if bias is None else bias.detach().double().abs())
    unit = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}[dtype]
    return size * (8 * 2.0**-24 + unit) + (2.0**-24 if dtype == torch.float16 else 2.0**-126)


def _sides(a: Any, b: Any) -> list[Any]:
    data = [
        x.reshape(-1, x.shape[-1]) if isinstance(x, Tensor) else x.codes.reshape(-1, x.codes.shape[-1]) for x in (a, b)
    ]
    schemes = [None if isinstance(x, Tensor) else x.scheme.name for x in (a, b)]
    scales = [[None] * 3 if isinstance(x, Tensor) else [x.scale, x.zero_point, x.global_scale] for x in (a, b)]
    return [*data, a.shape[-1], *schemes, *scales[0], *scales[1]]
