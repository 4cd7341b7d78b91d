"""``adopt_``: layers that bitsandbytes and torchao have quantized in memory become QuantLinears with the same codes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.convert.adapters import Adapter
from lowbit.convert.engine import Task, convert, forget_origin, swap
from lowbit.convert.maker import measured
from lowbit.convert.select import Verdict
from lowbit.interop.directories.recipes import recipe_of
from lowbit.nn.linear import QuantLinear
from lowbit.recipes import Cast
from lowbit.report import Report
from lowbit.scaling import scheme as find_scheme
from lowbit.tensor.packing import pack
from lowbit.tensor.quantized import Quantized

__all__ = ["LAYERS", "Layer", "adopt_"]

#: The adapter of every layer: reading it needs nothing else.
_EVERY = Adapter(lambda layer, make: layer, lambda layer, linear, plain: None, lambda layer: None)


class Layer(NamedTuple):
    """A class of quantized layers of another package.

    Attributes:
        package: The package, which is only used if it is imported.
        name: The class of the layer, or of its weight.
        read: ``read(layer)`` is the weight ``[N, K]`` with its codes, and the scheme of inputs, or None. Raises
            ValueError for what lowbit does not have.
    """

    package: str
    name: str
    read: Callable[[Any], tuple[Quantized, Cast | None]]


@torch.no_grad()
def adopt_(model: nn.Module) -> Report:
    """Replace layers that bitsandbytes or torchao have quantized by QuantLinears with the same codes, in place.

    Afterwards the model is as one that ``quantize_`` has quantized: ``save_model``, ``export``, ``prepack_`` and peft
    take it. Layers in 8 bits of bitsandbytes compute without its threshold for outliers, with inputs that are not
    quantized. Double-quantized scales of bitsandbytes are decoded to fp32.

    Args:
        model: A model with such layers, for example from ``from_pretrained(quantization_config=BitsAndBytesConfig())``.

    Returns:
        The report, with a row per layer.

    Raises:
        ValueError: A layer has a scheme that lowbit does not have, or there is no such layer. The model is unchanged.
    """
    task = Task("adopt_", "Linear4bit and Linear8bitLt of bitsandbytes, quantized Linears of torchao", _judge, _made,
                _measure, _put)  # fmt: skip
    return convert(model, task)[0]


def _layer_of(module: nn.Module) -> Layer | None:
    """The row of ``LAYERS`` for a module."""
    for owner in (module, module._parameters.get("weight")):
        package, name = type(owner).__module__.partition(".")[0], type(owner).__name__
        for row in LAYERS:
            if (row.package, row.name) == (package, name):
                return row
    return None


def _judge(names: list[str], module: nn.Module) -> Verdict:
    weight = module._parameters.get("weight")
    if _layer_of(module) is not None:
        return Verdict(adapter=_EVERY)
    if isinstance(module, nn.Linear) and type(weight).__module__.startswith("torchao."):
        known = ", ".join(row.name for row in LAYERS if row.package == "torchao")
        return Verdict(error=f"its weight is a {type(weight).__name__}, which lowbit does not read; it reads {known}")
    return Verdict(inside=True)


def _made(layer: nn.Module, adapter: Adapter, recipe: Any) -> QuantLinear:
    row = _layer_of(layer)
    assert row is not None
    weight, input = row.read(layer)
    linear = QuantLinear(weight, layer._parameters.get("bias"), recipe_of(weight.scheme, input))
    return linear.train(layer.training)


def _measure(layer: nn.Module, linear: Any, recipe: Any) -> dict[str, Any]:
    weights = linear.out_features * linear.in_features
    return measured(layer, linear, weights, linear.weight.nbytes * 8 / max(weights, 1))


def _put(model: nn.Module, layers: dict[int, Any]) -> None:
    """Swap the layers in, and remove the other package's quantizer of models of transformers."""
    for module in model.modules():
        quantizer: Any = vars(module).get("hf_quantizer")
        if quantizer is not None:
            quantizer.remove_quantization_config(module)
            for name in ("is_loaded_in_4bit", "is_loaded_in_8bit", "is_4bit_serializable", "is_8bit_serializable"):
                vars(module).pop(name, None)
    swap(model, layers)
    for layer in layers.values():
        forget_origin(layer)


# -- bitsandbytes ------------------------------------------------------------------------------------------------------
def _linear4bit(layer: Any) -> tuple[Quantized, None]:
    functional = sys.modules["bitsandbytes"].functional
    state = layer.weight.quant_state
    if state is None:
        raise ValueError("this Linear4bit is not quantized yet; move the model to its device first: model.to('cpu')")
    if state.quant_type != "nf4":
        raise ValueError(f"its format is {state.quant_type!r}, and lowbit has nf4; load the model with nf4")
    rows, cols = state.shape
    if cols % state.blocksize:
        raise ValueError(f"it has {cols} columns, and its blocks of {state.blocksize} reach over rows; decode it first")
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    codes = layer.weight.data.view(torch.uint8).reshape(rows, -1)  # the even column is in the high bits
    codes = codes >> 4 | codes << 4
    scheme = find_scheme(f"nf4:group{state.blocksize}")
    scale = absmax.float().reshape(rows, -1)[:, : cols // state.blocksize].contiguous()
    return Quantized(codes, scale, None, None, scheme, torch.Size((rows, cols)), state.dtype), None


def _linear8bit(layer: Any) -> tuple[Quantized, None]:
    weight, state = layer.weight, layer.state
    codes = weight.data if getattr(weight, "CB", None) is None else weight.CB
    codes, largest = codes if state.CB is None else state.CB, state.SCB if state.SCB is not None else weight.SCB
    if codes.dtype != torch.int8 or largest is None:
        raise ValueError("this Linear8bitLt is not quantized yet; move the model to its device first: model.to('cpu')")
    scale = (largest.float() / 127).reshape(-1, 1)
    dtype = getattr(layer.bias, "dtype", torch.float16)
    return Quantized(codes.view(torch.uint8), scale, None, None, find_scheme("int8:row"), codes.shape, dtype), None


# -- torchao -----------------------------------------------------------------------------------------------------------
def _int8_tensor(layer: Any) -> tuple[Quantized, Cast | None]:
    weight = layer.weight
    if weight.act_quant_scale is not None or weight.act_pre_scale is not None:
        raise ValueError("its inputs have static scales, which lowbit does not read; quantize the original model")
    input = None
    if weight.act_quant_kwargs is not None:
        kwargs = weight.act_quant_kwargs
        if kwargs.mapping_type.name != "SYMMETRIC" or type(kwargs.granularity).__name__ != "PerRow":
            raise ValueError(f"its inputs are quantized with {kwargs}; lowbit reads symmetric ones per row")
        input = Cast(find_scheme("int8:row"))
    return _integers(weight, 8), input


def _intx(layer: Any) -> tuple[Quantized, Cast | None]:
    weight = layer.weight
    bits = int(str(weight.target_dtype).removeprefix("torch.int"))
    kinds = {None: None, "int8_asym_per_token": "uint8:row:affine", "int8_sym_per_token": "int8:row"}
    quantization = weight.activation_quantization
    kind = quantization if quantization is None else str(getattr(quantization, "value", quantization))
    if kind not in kinds:
        raise ValueError(f"its inputs are quantized by {kind}; lowbit reads {', '.join(filter(None, kinds))}")
    name = kinds[kind]
    return _integers(weight, bits), None if name is None else Cast(find_scheme(name))


def _integers(weight: Any, bits: int) -> Quantized:
    """The weight of integers, one per int8, with a scale and a zero point per block of a row."""
    rows, cols = weight.qdata.shape
    lines, width = weight.block_size
    if (lines, cols % width) != (1, 0):
        raise ValueError(f"its blocks are {lines} x {width}, and lowbit reads blocks within a row")
    scale, zero = weight.scale.reshape(rows, -1), weight.zero_point
    option = {torch.float32: "", torch.bfloat16: ":bf16", torch.float16: ":fp16"}[scale.dtype]
    scaling, half = "row" if width == cols else f"group{width}", 1 << (bits - 1)
    offset = (weight.qdata.to(torch.int16) + half).to(torch.uint8)
    if zero is None or not bool(zero.any()):
        scheme = find_scheme(f"int{bits}:{scaling}{option}")
        return Quantized(pack(offset ^ half, bits), scale, None, None, scheme, torch.Size((rows, cols)), weight.dtype)
    scheme = find_scheme(f"uint{bits}:{scaling}:affine{option}")
    zeros = (zero.reshape(rows, -1).to(torch.int16) + half).to(torch.uint8)
    return Quantized(pack(offset, bits), scale, zeros, None, scheme, torch.Size((rows, cols)), weight.dtype)


def _float8_tensor(layer: Any) -> tuple[Quantized, Cast | None]:
    weight = layer.weight
    (rows, cols), (lines, width) = weight.qdata.shape, weight.block_size
    if weight.qdata.dtype != torch.float8_e4m3fn:
        raise ValueError(f"its elements are {weight.qdata.dtype}; lowbit reads float8_e4m3fn")
    scaling = {(1, cols): "row", (rows, cols): "tensor"}.get((lines, width), f"block{lines}x{width}")
    input = None
    if weight.act_quant_kwargs is not None:
        granularity = type(weight.act_quant_kwargs.granularity).__name__
        names = {"PerRow": "fp8_e4m3:row", "PerTensor": "fp8_e4m3:tensor"}
        if granularity not in names:
            raise ValueError(f"its inputs are quantized by {granularity}; lowbit reads {' and '.join(names)}")
        input = Cast(find_scheme(names[granularity]))
    scheme = find_scheme(f"fp8_e4m3:{scaling}")
    scale: Tensor = weight.scale.float().reshape(scheme.scale_shape(rows, cols))
    codes = weight.qdata.view(torch.uint8)
    return Quantized(codes, scale, None, None, scheme, torch.Size((rows, cols)), weight.dtype), input


#: The classes of layers, one row each.
LAYERS: tuple[Layer, ...] = (
    Layer("bitsandbytes", "Linear4bit", _linear4bit),
    Layer("bitsandbytes", "Linear8bitLt", _linear8bit),
    Layer("torchao", "Int8Tensor", _int8_tensor),
    Layer("torchao", "IntxUnpackedToInt8Tensor", _intx),
    Layer("torchao", "Float8Tensor", _float8_tensor),
)
