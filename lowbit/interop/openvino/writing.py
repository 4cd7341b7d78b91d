"""Writes an OpenVINO model: a graph in XML, and a file with its constants next to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowbit.interop.graphs import Row, Target
from lowbit.interop.graphs.layers import FLOAT8, Cast, Convolution, PerTensor, Product, Rounded, Table
from lowbit.interop.graphs.rows import Inputs, has_input, has_row_scales, is_weight_only, nearest, traced
from lowbit.interop.openvino.constants import compress
from lowbit.interop.openvino.layers import Bytes, Compressed
from lowbit.recipes import Recipe

__all__ = ["TARGET"]


def _constants(recipe: Recipe) -> bool:
    """Whether the weight's elements are one of OpenVINO's types of constants."""
    format = recipe.weight.format
    return not recipe.weight.reference_only and (format.kind == "integer" or format.name == "fp4_e2m1")


_SATURATES = "OpenVINO's integer products saturate on CPUs without VNNI; those of ONNX files in ONNX Runtime do not"

#: One row per pattern of operations; the first that takes a recipe writes it.
ROWS: tuple[Row, ...] = (
    Row("Constant", lambda recipe: is_weight_only(recipe) and has_row_scales(recipe, "integer")
        and recipe.weight.format.bits == 8,
        lambda layer: Product(layer, Bytes(layer.weight)),
        lambda layer: Convolution(layer, Bytes(layer.weight, layer))),
    Row("Constant", lambda recipe: is_weight_only(recipe) and _constants(recipe),
        lambda layer: Product(layer, Compressed(layer.weight))),
    Row("Constant", lambda recipe: is_weight_only(recipe) and recipe.weight.format.name == "nf4",
        lambda layer: Product(layer, Compressed(layer.weight)), complete=False),
    Row("Constant of FP8", lambda recipe: is_weight_only(recipe) and has_row_scales(recipe, "float"),
        lambda layer: Product(layer, Cast(layer.weight)),
        lambda layer: Convolution(layer, Cast(layer.weight, layer))),
    Row("Constant of FP8", lambda recipe: is_weight_only(recipe) and recipe.weight.format.name in FLOAT8,
        lambda layer: Product(layer, Cast(layer.weight))),
    Row("FakeQuantize", lambda recipe: recipe.static and has_input(recipe, "int8:tensor", "uint8:tensor:affine")
        and has_row_scales(recipe, "integer"),
        lambda layer: Product(layer, Bytes(layer.weight), PerTensor(layer)),
        lambda layer: Convolution(layer, Bytes(layer.weight, layer), PerTensor(layer.linear)), _SATURATES),
    Row("Constant", lambda recipe: not recipe.static and has_input(recipe, "int8:row") and _constants(recipe),
        lambda layer: Product(layer, Compressed(layer.weight), Rounded())),
)  # fmt: skip


def _save(model: nn.Module, inputs: Inputs, path: Path) -> None:
    import openvino

    program = traced(model, inputs)
    shapes = [_shape(value, inputs.axes[name]) for name, value in inputs.values.items()]
    given = None if None in shapes else list(map(openvino.PartialShape, shapes))
    converted = openvino.convert_model(program, input=given)
    openvino.save_model(compress(converted), str(path), compress_to_fp16=False)


def _shape(value: Any, axes: Any) -> list[int] | None:
    """The shape of an input, with -1 for axes of any length; None if it is no tensor."""
    if not isinstance(value, torch.Tensor):
        return None
    return [-1 if axis in (axes or {}) else size for axis, size in enumerate(value.shape)]


TARGET = Target(
    "openvino", ROWS, lambda layer: Table(layer.weight),
    "static inputs, or 8-bit weights and float inputs, as in int8-static", _save, ("openvino",), nearest,
)  # fmt: skip
