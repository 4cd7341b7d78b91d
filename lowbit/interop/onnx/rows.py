"""The table of operators: which writes the layers of a recipe."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from lowbit.interop.files import Refusal
from lowbit.interop.onnx import layers
from lowbit.interop.onnx.weights import block_size
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Recipe

__all__ = ["ROWS", "Row", "refuses", "row_of"]


class Row(NamedTuple):
    """An operator for Linears.

    Attributes:
        name: The operator that multiplies or decodes.
        takes: Whether it can express a recipe.
        make: Makes the module that writes it.
        note: A difference to lowbit's results beyond the order of sums, for the report.
    """

    name: str
    takes: Callable[[Recipe], bool]
    make: Callable[[QuantLinear], nn.Module]
    note: str | None = None


def _blocks(recipe: Recipe) -> bool:
    """Whether the weight has integers with scales within rows, in blocks whose size is a power of two."""
    scheme = recipe.weight
    plain = scheme.format.kind == "integer" and not scheme.reference_only and scheme.block[0] == 1
    return plain and block_size(scheme) >= 16


def _weight_only(recipe: Recipe) -> bool:
    return recipe.input is None


def _eight_bits(recipe: Recipe, kind: str) -> bool:
    """Whether the weight has 8-bit elements with one scale per row or per matrix, and no zero points."""
    scheme = recipe.weight
    eight = scheme.format.kind == kind and scheme.format.bits == 8 and scheme.format.signed
    return eight and scheme.block[1] is None and not scheme.affine and not scheme.global_scale


def _input(recipe: Recipe, *names: str) -> bool:
    return recipe.input is not None and recipe.input.name in names


#: One row per operator; the first that takes a recipe writes it.
ROWS: tuple[Row, ...] = (
    Row("MatMulNBits", lambda recipe: _weight_only(recipe) and _blocks(recipe), layers.NBits),
    Row("MatMulBnb4", lambda recipe: _weight_only(recipe) and recipe.weight.format.name == "nf4"
        and block_size(recipe.weight) >= 16, layers.Bnb4),
    Row("GatherBlockQuantized", lambda recipe: _weight_only(recipe) and recipe.weight.format.name == "fp4_e2m1"
        and recipe.weight.block[0] == 1 and (recipe.weight.block[1] or 0) in (16, 32, 64, 128), layers.Fp4Linear),
    Row("DequantizeLinear", lambda recipe: _weight_only(recipe) and _eight_bits(recipe, "float"),
        layers.DequantizedLinear),
    Row("MatMulInteger", lambda recipe: not recipe.static and _input(recipe, "int8:row")
        and _eight_bits(recipe, "integer"), layers.Dynamic),
    Row("DynamicQuantizeLinear", lambda recipe: not recipe.static and _input(recipe, "uint8:tensor:affine")
        and _eight_bits(recipe, "integer"), layers.DynamicAffine),
    Row("QuantizeLinear", lambda recipe: recipe.static and _input(recipe, "int8:tensor", "uint8:tensor:affine")
        and _eight_bits(recipe, "integer"), layers.Static),
    Row("QuantizeLinear", lambda recipe: recipe.static and _input(recipe, "fp8_e4m3:tensor")
        and _eight_bits(recipe, "float"), layers.Static),
    Row("MatMulNBits", lambda recipe: not recipe.static and _input(recipe, "int8:row") and _blocks(recipe),
        lambda layer: layers.NBits(layer, 4),
        "MatMulNBits quantizes inputs to 8 bits in its own blocks, so results differ by that rounding"),
)  # fmt: skip

#: The nearest recipe, by format and by whether inputs are quantized.
_NEAREST = {
    "fp8_e4m3": "fp8-weight-only", "fp8_e5m2": "fp8-weight-only", "fp4_e2m1": "mxfp4-weight-only",
    "fp6_e2m3": "int8-weight-only", "fp6_e3m2": "int8-weight-only",
}  # fmt: skip


def row_of(recipe: Recipe) -> Row | None:
    """The operator for a recipe, or None."""
    return None if recipe.rotation is not None else next((row for row in ROWS if row.takes(recipe)), None)


def refuses(recipe: Recipe) -> Refusal | None:
    """Why no operator can express a recipe, with the nearest recipe; None if one can."""
    if row_of(recipe) is not None:
        return None
    weight = recipe.weight
    nearest = _NEAREST.get(weight.format.name) or (
        "int8" if recipe.input is not None and weight.format.bits == 8
        else "int8-weight-only" if weight.format.bits > 4 else "int4-weight-only:group32"
    )  # fmt: skip
    if recipe.rotation is not None:
        return Refusal("its weights are rotated by a Hadamard transform", nearest)
    inputs = "float inputs" if recipe.input is None else f"inputs in {recipe.input}"
    return Refusal(f"no operator has weights in {weight} with {inputs}", nearest)
