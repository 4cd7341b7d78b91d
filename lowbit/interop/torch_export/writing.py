"""Writes a program of ``torch.export``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lowbit.interop.graphs import Row, Target
from lowbit.interop.graphs.layers import Cast, Convolution, Float8Input, Product, Table, TensorInput
from lowbit.interop.graphs.rows import has_float8_rows, has_integer_rows, is_float8, is_integer
from lowbit.interop.graphs.tracing import Inputs, traced
from lowbit.interop.torch_export.layers import PerChannel, PerToken, per_group

__all__ = ["TARGET"]


_RECIPROCAL = "torch multiplies inputs by the reciprocal of their scale, so a code may differ by one"

#: One row per op; the first that takes a recipe writes it.
ROWS: tuple[Row, ...] = (
    Row("dequantize_per_channel", has_integer_rows, lambda layer: Product(layer, PerChannel(layer.weight)),
        lambda layer: Convolution(layer, PerChannel(layer.weight, layer))),
    Row("dequantize_per_channel_group", is_integer, lambda layer: Product(layer, per_group(layer.weight))),
    Row("cast from FP8", has_float8_rows, lambda layer: Product(layer, Cast(layer.weight)),
        lambda layer: Convolution(layer, Cast(layer.weight, layer))),
    Row("cast from FP8", is_float8, lambda layer: Product(layer, Cast(layer.weight))),
    Row("table of values", lambda scheme: not scheme.reference_only,
        lambda layer: Product(layer, Table(layer.weight))),
    Row("quantize_per_tensor", has_integer_rows,
        lambda layer: Product(layer, PerChannel(layer.weight), TensorInput(layer)),
        lambda layer: Convolution(layer, PerChannel(layer.weight, layer), TensorInput(layer.linear)),
        ("int8:tensor", "uint8:tensor:affine"), static=True, note=_RECIPROCAL),
    Row("quantize_per_token", has_integer_rows, lambda layer: Product(layer, PerChannel(layer.weight), PerToken()),
        inputs=("int8:row",), note=_RECIPROCAL),
    Row("quantize_per_token", is_integer, lambda layer: Product(layer, per_group(layer.weight), PerToken()),
        inputs=("int8:row",), note=_RECIPROCAL),
    Row("cast to FP8", has_float8_rows, lambda layer: Product(layer, Cast(layer.weight), Float8Input(layer)),
        lambda layer: Convolution(layer, Cast(layer.weight, layer), Float8Input(layer.linear)),
        ("fp8_e4m3:tensor",), static=True),
    Row("cast to FP8", is_float8, lambda layer: Product(layer, Cast(layer.weight), Float8Input(layer)),
        inputs=("fp8_e4m3:row", "fp8_e4m3:tensor")),
)  # fmt: skip


def _save(model: nn.Module, inputs: Inputs, path: Path) -> None:
    torch.export.save(traced(model, inputs), path)


TARGET = Target("torch", ROWS, lambda layer: Table(layer.weight), _save, suffix=".pt2")
