"""The table of operators: which writes the layers of a recipe."""

from __future__ import annotations

from lowbit.interop.graphs.layers import Float8, Product
from lowbit.interop.graphs.rows import Row, has_input, has_row_scales, is_weight_only
from lowbit.interop.graphs.weights import block_size
from lowbit.interop.onnx import layers
from lowbit.recipes import Recipe

__all__ = ["ROWS"]


def _blocks(recipe: Recipe) -> bool:
    """Whether the weight has integers with scales within rows, in blocks whose size is a power of two."""
    scheme = recipe.weight
    plain = scheme.format.kind == "integer" and not scheme.reference_only and scheme.block[0] == 1
    return plain and block_size(scheme) >= 16


#: One row per operator; the first that takes a recipe writes it.
ROWS: tuple[Row, ...] = (
    Row("MatMulNBits", lambda recipe: is_weight_only(recipe) and _blocks(recipe), layers.NBits),
    Row("MatMulBnb4", lambda recipe: is_weight_only(recipe) and recipe.weight.format.name == "nf4"
        and block_size(recipe.weight) >= 16, layers.Bnb4),
    Row("GatherBlockQuantized", lambda recipe: is_weight_only(recipe) and recipe.weight.format.name == "fp4_e2m1"
        and recipe.weight.block[0] == 1 and (recipe.weight.block[1] or 0) in (16, 32, 64, 128),
        lambda layer: Product(layer, layers.Fp4(layer.weight))),
    Row("DequantizeLinear", lambda recipe: is_weight_only(recipe) and has_row_scales(recipe, "float"),
        lambda layer: Product(layer, layers.Dequantized(layer.weight)), layers.Conv),
    Row("MatMulInteger", lambda recipe: not recipe.static and has_input(recipe, "int8:row")
        and has_row_scales(recipe, "integer"), layers.Dynamic),
    Row("DynamicQuantizeLinear", lambda recipe: not recipe.static and has_input(recipe, "uint8:tensor:affine")
        and has_row_scales(recipe, "integer"), layers.DynamicAffine),
    Row("QuantizeLinear", lambda recipe: recipe.static and has_input(recipe, "int8:tensor", "uint8:tensor:affine")
        and has_row_scales(recipe, "integer"), layers.Static, layers.Conv),
    Row("QuantizeLinear", lambda recipe: recipe.static and has_input(recipe, "fp8_e4m3:tensor")
        and has_row_scales(recipe, "float"), layers.Static, layers.Conv),
    Row("Cast", lambda recipe: not recipe.static and has_input(recipe, "fp8_e4m3:row", "fp8_e4m3:tensor")
        and has_row_scales(recipe, "float"),
        lambda layer: Product(layer, layers.Dequantized(layer.weight), Float8(layer))),
    Row("MatMulNBits", lambda recipe: not recipe.static and has_input(recipe, "int8:row") and _blocks(recipe),
        lambda layer: layers.NBits(layer, 4), None,
        "MatMulNBits quantizes inputs to 8 bits in its own blocks, so results differ by that rounding"),
)  # fmt: skip
