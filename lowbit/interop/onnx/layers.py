"""Modules that take the place of quantized layers during an export. Their forward writes operators of ONNX."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.interop.graphs.layers import FLOAT8, Layer, LinearLayer, Table, as_kernel, dynamic_scale
from lowbit.interop.graphs.rows import is_integer
from lowbit.interop.graphs.weights import block_size, blocks, integers, row_scales, scales
from lowbit.nn.conv import QuantConv
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.linear import QuantLinear
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Quantized

__all__ = [
    "ORT", "Bnb4", "Dequantized", "Dynamic", "DynamicAffine", "Fp4", "NBits", "Static", "StaticInput", "embedding",
    "has_blocks", "kernel", "symbolic", "weight_of",
]  # fmt: skip

#: The zero point of signed integers that are stored as uint8.
_ZERO = 128

#: The domain of ONNX Runtime's operators.
ORT = "com.microsoft"


def symbolic(name: str, inputs: tuple[Tensor | None, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Any:
    """Write an operator; ``name`` has its domain, if that is not ONNX's."""
    version = 1 if "::" in name else None
    return torch.onnx.ops.symbolic(name, inputs, attributes, dtype=dtype, shape=shape, version=version)


class NBits(LinearLayer):
    """MatMulNBits: integers of 2, 4 or 8 bits; ``level`` 4 quantizes inputs to 8 bits, in ONNX Runtime's own way."""

    def __init__(self, layer: QuantLinear, level: int = 0) -> None:
        super().__init__(layer)
        stored = blocks(layer.weight)
        self.attributes = {"K": self.cols, "N": self.rows, "bits": stored.bits, "block_size": stored.block,
                           "accuracy_level": level}  # fmt: skip
        self.register_buffer("codes", stored.codes)
        self.register_buffer("scales", stored.scales)
        self.register_buffer("zero_points", stored.zero_points)

    def multiply(self, x: Tensor) -> Tensor:
        inputs = (x, self.codes, self.scales, *(() if self.zero_points is None else (self.zero_points,)))
        y: Tensor = symbolic(f"{ORT}::MatMulNBits", inputs, x.dtype, (*x.shape[:-1], self.rows), **self.attributes)
        return y


class Bnb4(LinearLayer):
    """MatMulBnb4: NF4 in blocks over the flat matrix, with the even element in the high bits."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        weight = layer.weight
        size = block_size(weight.scheme)
        if self.cols % size:
            raise ValueError(
                f"it has {self.cols} columns, and blocks of {size} would reach over rows; quantize it with "
                f"'int4-weight-only:group32'"
            )
        self.attributes = {"K": self.cols, "N": self.rows, "block_size": size, "quant_type": 1}
        repeats = (weight.scheme.block[1] or self.cols) // size
        self.register_buffer("codes", (weight.codes >> 4 | weight.codes << 4).flatten())
        self.register_buffer("scales", scales(weight).repeat_interleave(repeats, 1).flatten())

    def multiply(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.rows)
        y: Tensor = symbolic(
            f"{ORT}::MatMulBnb4", (x, self.codes, self.scales), x.dtype, shape, **self.attributes
        )  # fmt: skip
        return y


class Fp4(Layer):
    """GatherBlockQuantized of all rows: ONNX Runtime has no product of FP4 weights on CPUs."""

    def __init__(self, weight: Quantized) -> None:
        super().__init__()
        self.shape = tuple(weight.shape)
        rows, cols = self.shape
        self.block = weight.scheme.block[1] or cols
        if cols % 2:
            raise ValueError(
                f"it has {cols} columns, and two codes share a byte; quantize it with 'int4-weight-only:group32'"
            )
        self.register_buffer("codes", weight.codes.view(torch.float4_e2m1fn_x2))
        self.register_buffer("scales", scales(weight))
        self.register_buffer("lines", torch.arange(rows))

    def forward(self) -> Tensor:
        weight: Tensor = symbolic(
            f"{ORT}::GatherBlockQuantized", (self.codes, self.lines, self.scales), torch.float32, self.shape,
            gather_axis=0, quantize_axis=1, block_size=self.block,
        )  # fmt: skip
        return weight


class Dequantized(Layer):
    """DequantizeLinear: integers or FP8 with a scale per row or per matrix; for a convolution, in its layout."""

    def __init__(self, weight: Quantized, conv: QuantConv | None = None) -> None:
        super().__init__()
        codes, scale = weight_of(weight)
        self.register_buffer("codes", codes if conv is None else as_kernel(codes, conv))
        self.register_buffer("scales", scale)
        self.register_buffer("zeros", _zeros(codes, scale))

    def forward(self) -> Tensor:
        inputs = (self.codes, self.scales, self.zeros)
        weight: Tensor = symbolic("DequantizeLinear", inputs, torch.float32, self.codes.shape, axis=0)
        return weight


def weight_of(weight: Quantized) -> tuple[Tensor, Tensor]:
    """The codes ``[N, K]`` of 8 bits as ONNX's elements, and a scale per row.

    Integers are uint8 with the zero point 128. ONNX Runtime's products of uint8 and int8 saturate on processors without
    VNNI; those of uint8 are exact.
    """
    scale = row_scales(weight)
    if weight.scheme.format.kind == "integer":
        return (integers(weight) + _ZERO).to(torch.uint8), scale
    return weight.codes.view(FLOAT8[weight.scheme.format.name]), scale


def _zeros(codes: Tensor, scale: Tensor) -> Tensor:
    """The zero point of each row."""
    return torch.full_like(scale, _ZERO if codes.dtype == torch.uint8 else 0).to(codes.dtype)


class Dynamic(LinearLayer):
    """MatMulInteger: inputs of 8 bits with a scale per row, computed at run time, and weights of 8 bits."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        codes, scale = weight_of(layer.weight)
        self.register_buffer("codes", codes.t().contiguous())
        self.register_buffer("scales", scale)
        self.register_buffer("zero", torch.tensor(_ZERO, dtype=torch.uint8))
        assert layer.recipe.input is not None
        self.most = float(layer.recipe.input.format.max)

    def multiply(self, x: Tensor) -> Tensor:
        scale = dynamic_scale(x, self.most)
        q = ((x / scale).round().clamp(-self.most, self.most) + _ZERO).to(torch.uint8)
        inputs = (q, self.codes, self.zero, self.zero)
        product = symbolic("MatMulInteger", inputs, torch.int32, (*x.shape[:-1], self.rows))
        # One product of both scales would match a fusion of ONNX Runtime that expects a single scale of the input.
        result: Tensor = product.float() * scale * self.scales
        return result


class DynamicAffine(Dynamic):
    """DynamicQuantizeLinear, then MatMulInteger: inputs of uint8 with one scale and zero point."""

    def multiply(self, x: Tensor) -> Tensor:
        q, scale, zero = torch.onnx.ops.symbolic_multi_out(
            "DynamicQuantizeLinear", (x,), {}, dtypes=(torch.uint8, torch.float32, torch.uint8),
            shapes=(x.shape, (), ()),
        )  # fmt: skip
        inputs = (q, self.codes, zero, self.zero)
        product = symbolic("MatMulInteger", inputs, torch.int32, (*x.shape[:-1], self.rows))
        result: Tensor = product.float() * (scale * self.scales)
        return result


class StaticInput(Layer):
    """QuantizeLinear and DequantizeLinear with a static scale."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        scheme, given = layer.recipe.input, layer.input_scales
        assert scheme is not None and given is not None
        self.register_buffer("scale", given.scale.float().reshape(()))
        self.lowest: float | None = None
        if scheme.format.kind == "integer":
            self.dtype = torch.uint8
            zero = torch.tensor(_ZERO) if given.zero_point is None else given.zero_point.reshape(())
            self.register_buffer("zero", zero.to(torch.uint8))
            if scheme.format.signed:  # changes no value, and keeps ONNX Runtime from quantizing the biases before it
                self.lowest = float(given.scale) * scheme.format.qmin
        else:
            self.dtype = torch.float8_e4m3fn
            self.register_buffer("zero", torch.zeros((), dtype=self.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.lowest is not None:
            x = x.clamp_min(self.lowest)
        q = symbolic("QuantizeLinear", (x, self.scale, self.zero), self.dtype, x.shape)
        rounded: Tensor = symbolic("DequantizeLinear", (q, self.scale, self.zero), x.dtype, x.shape)
        return rounded


class Static(LinearLayer):
    """Explicit QuantizeLinear and DequantizeLinear around a MatMul, which runtimes turn into an integer product."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        codes, scale = weight_of(layer.weight)
        self.register_buffer("codes", codes.t().contiguous())
        self.register_buffer("scales", scale)
        self.register_buffer("zeros", _zeros(codes, scale))
        self.rounded = StaticInput(layer)

    def multiply(self, x: Tensor) -> Tensor:
        inputs = (self.codes, self.scales, self.zeros)
        weight = symbolic("DequantizeLinear", inputs, x.dtype, (self.cols, self.rows), axis=1)
        result: Tensor = self.rounded(x) @ weight
        return result


def kernel(layer: QuantConv) -> Dequantized:
    """The module that writes the weight of a convolution."""
    return Dequantized(layer.weight, layer)


def has_blocks(scheme: Scheme) -> bool:
    """Whether a scheme has integers with scales within rows, in blocks that ONNX Runtime has."""
    return is_integer(scheme) and scheme.block[0] == 1 and block_size(scheme) >= 16


def embedding(layer: QuantEmbedding) -> Layer:
    """GatherBlockQuantized for integers, and a table for other formats."""
    scheme = layer.weight.scheme
    blocked = has_blocks(scheme) and not layer.embedding_dim % block_size(scheme)
    return Embedding(layer) if blocked else Table(layer.weight)


class Embedding(Layer):
    """GatherBlockQuantized of integers."""

    def __init__(self, layer: QuantEmbedding) -> None:
        super().__init__()
        stored = blocks(layer.weight)
        self.bits, self.block, self.width = stored.bits, stored.block, layer.embedding_dim
        self.register_buffer("codes", stored.codes.flatten(1))
        self.register_buffer("scales", stored.scales)
        self.register_buffer("zero_points", stored.zero_points)

    def forward(self, ids: Tensor) -> Tensor:
        inputs = (self.codes, ids, self.scales, *(() if self.zero_points is None else (self.zero_points,)))
        rows: Tensor = symbolic(
            f"{ORT}::GatherBlockQuantized", inputs, torch.float32, (*ids.shape, self.width),
            gather_axis=0, quantize_axis=1, block_size=self.block, bits=self.bits,
        )  # fmt: skip
        return rows
