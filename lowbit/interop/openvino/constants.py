"""Turns constants of bytes into constants of OpenVINO's low-bit types."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from lowbit.formats import FORMATS
from lowbit.tensor.packing import pack

__all__ = ["HALVES", "PREFIX", "compress"]

#: The beginning of the names of buffers that ``compress`` changes. The type follows.
PREFIX = "lowbit_"


#: The name of buffers with half the scales, of types whose bytes are twice their values.
HALVES = "lowbit_halves"


class _Type(NamedTuple):
    """A type of constants: its bits, and the codes of the bytes that stand for it, or None if they are equal."""

    bits: int
    codes: Callable[[Any], Any] | None = None


def _fp4(values: Any) -> Any:
    """Codes of FP4 from twice their values."""
    format = FORMATS["fp4_e2m1"]
    table = np.zeros(256, np.uint8)
    for code in range(16):
        # Minus zero has no integer: both zeros are written as the positive one.
        if format.value(code) or code == 0:
            table[int(2 * format.value(code)) & 255] = code
    return table[values.astype(np.int8).view(np.uint8)]


#: Types of OpenVINO's constants, by name.
_TYPES: dict[str, _Type] = {
    "u2": _Type(2), "i4": _Type(4, lambda values: values.astype(np.int8).view(np.uint8) & 15), "u4": _Type(4),
    "nf4": _Type(4), "f4e2m1": _Type(4, _fp4),
}  # fmt: skip


def compress(model: Any) -> Any:
    """Give the constants of a converted model their low-bit types, in place.

    Models that were converted within ``lowbit.interop.exportable(model, "openvino")`` have a byte per code before.

    Args:
        model: An ``openvino.Model``.

    Returns:
        ``model``.
    """
    import openvino

    # the exporter of transformers ends names with a number
    marker = re.compile(rf"({HALVES}|{PREFIX}(?:{'|'.join(_TYPES)}))(?:_\d+)?\b")
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Constant":
            continue
        match = next(filter(None, map(marker.search, sorted(node.output(0).get_names()))), None)
        if match is None:
            continue
        name, values = match.group(1), np.asarray(node.get_data())
        tensor = openvino.Tensor(2 * values) if name == HALVES else _packed(values, name.removeprefix(PREFIX))
        constant = openvino.op.Constant(tensor)
        constant.set_friendly_name(node.get_friendly_name())
        node.output(0).replace(constant.output(0))
        constant.output(0).get_tensor().set_names({constant.get_friendly_name()})  # done: a second call changes nothing
        if name != HALVES:
            _fix_shape(constant)
    model.validate_nodes_and_infer_types()
    return model


def _packed(values: Any, name: str) -> Any:
    """A tensor of a low-bit type, from a byte per code."""
    import openvino

    bits, codes = _TYPES[name]
    flat = values.reshape(-1)
    numbers = torch.from_numpy(np.ascontiguousarray(codes(flat) if codes else flat))
    tensor = openvino.Tensor(getattr(openvino.Type, name), openvino.Shape(values.shape))
    tensor.data.reshape(-1)[:] = pack(numbers[None], bits)[0].numpy()  # the tensor must own its memory
    return tensor


def _fix_shape(constant: Any) -> None:
    """Give the Reshape of a weight its shape as a constant.

    The conversion computes it from the shape of the input if that is dynamic, and the weight would not be compressed.
    """
    import openvino

    rows, *groups = constant.get_output_shape(0)
    node = constant
    while node.get_type_name() in ("Constant", "Convert", "Subtract", "Multiply"):
        node = next(iter(node.output(0).get_target_inputs())).get_node()
    if node.get_type_name() == "Reshape":
        shape = np.array([rows, math.prod(groups)], dtype=np.int64)
        node.input(1).replace_source_output(openvino.op.Constant(shape).output(0))
