"""The table of operators: which writes the layers of a recipe."""

from __future__ import annotations

from lowbit.interop.graphs.layers import Convolution, Float8Input, Product
from lowbit.interop.graphs.rows import ExpertsRow, Row, has_float8_rows, has_integer_rows
from lowbit.interop.graphs.weights import block_size
from lowbit.interop.onnx import experts, layers
from lowbit.interop.onnx.layers import has_blocks
from lowbit.scaling import Scheme

__all__ = ["EXPERTS", "ROWS"]


def _nf4(scheme: Scheme) -> bool:
    return scheme.format.name == "nf4" and scheme.block[0] == 1 and block_size(scheme) >= 16


def _fp4(scheme: Scheme) -> bool:
    return scheme.format.name == "fp4_e2m1" and scheme.block[0] == 1 and scheme.block[1] in (16, 32, 64, 128)


def _experts4(scheme: Scheme) -> bool:
    return has_blocks(scheme) and scheme.format.bits in (3, 4)


def _experts8(scheme: Scheme) -> bool:
    return has_integer_rows(scheme) and 4 < scheme.format.bits <= 8


#: One row per operator; the first that takes a recipe writes it.
ROWS: tuple[Row, ...] = (
    Row("MatMulNBits", lambda scheme: has_integer_rows(scheme) and has_blocks(scheme), layers.NBits,
        lambda layer: Convolution(layer, layers.kernel(layer))),
    Row("MatMulNBits", has_blocks, layers.NBits),
    Row("MatMulBnb4", _nf4, layers.Bnb4),
    Row("GatherBlockQuantized", _fp4, lambda layer: Product(layer, layers.Fp4(layer.weight))),
    Row("DequantizeLinear", has_float8_rows, lambda layer: Product(layer, layers.Dequantized(layer.weight)),
        lambda layer: Convolution(layer, layers.kernel(layer))),
    Row("MatMulInteger", has_integer_rows, layers.Dynamic, inputs=("int8:row",)),
    Row("DynamicQuantizeLinear", has_integer_rows, layers.DynamicAffine, inputs=("uint8:tensor:affine",)),
    Row("QuantizeLinear", has_integer_rows, layers.Static,
        lambda layer: Convolution(layer, layers.kernel(layer), layers.StaticInput(layer.linear)),
        ("int8:tensor", "uint8:tensor:affine"), static=True),
    Row("QuantizeLinear", has_float8_rows, layers.Static,
        lambda layer: Convolution(layer, layers.kernel(layer), layers.StaticInput(layer.linear)),
        ("fp8_e4m3:tensor",), static=True),
    Row("Cast", has_float8_rows, lambda layer: Product(layer, layers.Dequantized(layer.weight), Float8Input(layer)),
        inputs=("fp8_e4m3:row", "fp8_e4m3:tensor")),
    Row("MatMulNBits", has_blocks, lambda layer: layers.NBits(layer, 4), inputs=("int8:row",),
        note="MatMulNBits quantizes inputs to 8 bits in its own blocks, so results differ by that rounding"),
)  # fmt: skip

#: The same for the experts of mixtures. QMoE rounds inputs to 8 bits for weights of 8 bits in blocks, but not in rows.
EXPERTS: tuple[ExpertsRow, ...] = (
    ExpertsRow("QMoE", _experts4, experts.refuses_blocks, experts.Blocks),
    ExpertsRow("QMoE", _experts8, experts.refuses, experts.Rows),
    ExpertsRow("QMoE", _experts4, experts.refuses_blocks, lambda layer: experts.Blocks(layer, 4), ("int8:row",),
               note="QMoE quantizes inputs to 8 bits in its own blocks, so results differ by that rounding"),
)  # fmt: skip
