"""Writes an OpenVINO model: a graph in XML, and a file with its constants next to it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from lowbit.interop.graphs import Row, Target
from lowbit.interop.graphs.layers import Cast, Convolution, Product, RowInput, Table, TensorInput
from lowbit.interop.graphs.rows import has_float8_rows, has_integer_rows, is_float8, is_integer
from lowbit.interop.graphs.tracing import Inputs, input_shapes, traced
from lowbit.interop.openvino.constants import compress
from lowbit.interop.openvino.layers import Bytes, Compressed
from lowbit.scaling import Scheme

__all__ = ["TARGET"]


def _constants(scheme: Scheme) -> bool:
    """Whether the elements are one of OpenVINO's types of constants."""
    return is_integer(scheme) or scheme.format.name == "fp4_e2m1"


_SATURATES = "OpenVINO's integer products saturate on CPUs without VNNI; those of ONNX files in ONNX Runtime do not"

#: One row per pattern of operations; the first that takes a recipe writes it.
ROWS: tuple[Row, ...] = (
    Row("i8", lambda scheme: has_integer_rows(scheme) and scheme.format.bits == 8,
        lambda layer: Product(layer, Bytes(layer.weight)),
        lambda layer: Convolution(layer, Bytes(layer.weight, layer))),
    Row("u2, i4, u4, i8, u8 or f4e2m1", _constants, lambda layer: Product(layer, Compressed(layer.weight))),
    Row("nf4", lambda scheme: scheme.format.name == "nf4", lambda layer: Product(layer, Compressed(layer.weight)),
        complete=False),
    Row("f8", has_float8_rows,
        lambda layer: Product(layer, Cast(layer.weight)),
        lambda layer: Convolution(layer, Cast(layer.weight, layer))),
    Row("f8", is_float8, lambda layer: Product(layer, Cast(layer.weight))),
    Row("i8, FakeQuantize", has_integer_rows, lambda layer: Product(layer, Bytes(layer.weight), TensorInput(layer)),
        lambda layer: Convolution(layer, Bytes(layer.weight, layer), TensorInput(layer.linear)),
        ("int8:tensor", "uint8:tensor:affine"), static=True, note=_SATURATES),
    Row("i4 or i8", _constants, lambda layer: Product(layer, Compressed(layer.weight), RowInput()),
        inputs=("int8:row",)),
)  # fmt: skip


def _save(model: nn.Module, inputs: Inputs, path: Path) -> None:
    import openvino

    program = traced(model, inputs)
    converted = openvino.convert_model(program, input=list(map(openvino.PartialShape, input_shapes(program))))
    openvino.save_model(compress(converted), str(path), compress_to_fp16=False)


TARGET = Target("openvino", ROWS, lambda layer: Table(layer.weight), _save, ("openvino",), ".xml")
