"""Writes a program of ``torch.export``."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from lowbit.interop.graphs import Row, Target
from lowbit.interop.graphs.layers import FLOAT8, Cast, Convolution, Float8, PerTensor, Product, Table
from lowbit.interop.graphs.rows import Inputs, has_input, has_row_scales, is_weight_only, nearest, traced
from lowbit.interop.torch_export.layers import PerChannel, PerGroup, PerToken
from lowbit.recipes import Recipe

__all__ = ["TARGET"]


def _integers(recipe: Recipe) -> bool:
    return recipe.weight.format.kind == "integer" and not recipe.weight.reference_only


def _float8(recipe: Recipe) -> bool:
    return recipe.weight.format.name in FLOAT8


#: One row per op; the first that takes a recipe writes it.
ROWS: tuple[Row, ...] = (
    Row("dequantize_per_channel", lambda recipe: is_weight_only(recipe) and has_row_scales(recipe, "integer"),
        lambda layer: Product(layer, PerChannel(layer.weight)),
        lambda layer: Convolution(layer, PerChannel(layer.weight, layer))),
    Row("dequantize_per_channel_group", lambda recipe: is_weight_only(recipe) and _integers(recipe),
        lambda layer: Product(layer, PerGroup(layer.weight))),
    Row("to", lambda recipe: is_weight_only(recipe) and has_row_scales(recipe, "float"),
        lambda layer: Product(layer, Cast(layer.weight)),
        lambda layer: Convolution(layer, Cast(layer.weight, layer))),
    Row("to", lambda recipe: is_weight_only(recipe) and _float8(recipe),
        lambda layer: Product(layer, Cast(layer.weight))),
    Row("index", lambda recipe: is_weight_only(recipe) and not recipe.weight.reference_only,
        lambda layer: Product(layer, Table(layer.weight))),
    Row("quantize_per_tensor", lambda recipe: recipe.static and has_input(recipe, "int8:tensor", "uint8:tensor:affine")
        and has_row_scales(recipe, "integer"),
        lambda layer: Product(layer, PerChannel(layer.weight), PerTensor(layer)),
        lambda layer: Convolution(layer, PerChannel(layer.weight, layer), PerTensor(layer.linear))),
    Row("quantize_per_token", lambda recipe: not recipe.static and has_input(recipe, "int8:row")
        and has_row_scales(recipe, "integer"),
        lambda layer: Product(layer, PerChannel(layer.weight), PerToken())),
    Row("quantize_per_token", lambda recipe: not recipe.static and has_input(recipe, "int8:row") and _integers(recipe),
        lambda layer: Product(layer, PerGroup(layer.weight), PerToken())),
    Row("to", lambda recipe: recipe.static and has_input(recipe, "fp8_e4m3:tensor") and has_row_scales(recipe, "float"),
        lambda layer: Product(layer, Cast(layer.weight), Float8(layer)),
        lambda layer: Convolution(layer, Cast(layer.weight, layer), Float8(layer.linear))),
    Row("to", lambda recipe: has_input(recipe, "fp8_e4m3:row", "fp8_e4m3:tensor") and _float8(recipe),
        lambda layer: Product(layer, Cast(layer.weight), Float8(layer))),
)  # fmt: skip


def _save(model: nn.Module, inputs: Inputs, path: Path) -> None:
    program = traced(model, inputs)
    torch.export.save(program, path)


TARGET = Target(
    "torch", ROWS, lambda layer: Table(layer.weight),
    "static inputs, or 8-bit weights and float inputs, as in int8-static", _save, (), nearest,
)  # fmt: skip
