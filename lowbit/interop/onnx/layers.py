"""Modules that take the place of quantized layers during an export. Their forward writes operators of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.interop.onnx.weights import block_size, blocks, integers, scales
from lowbit.nn.conv import QuantConv
from lowbit.nn.linear import QuantLinear
from lowbit.tensor.packing import unpack
from lowbit.tensor.quantized import Quantized

__all__ = [
    "Bnb4", "Conv", "DequantizedLinear", "Dynamic", "DynamicAffine", "Embedding", "Fp4Linear", "NBits", "Static",
]  # fmt: skip

#: The zero point of signed integers that are stored as uint8.
_ZERO = 128

#: The domain of ONNX Runtime's operators.
_ORT = "com.microsoft"


def _symbolic(name: str, inputs: tuple[Tensor | None, ...], dtype: torch.dtype, shape: Any, **attributes: Any) -> Any:
    domain, version = ("", None) if "::" not in name else (name, 1)
    return torch.onnx.ops.symbolic(
        name, inputs, attributes, dtype=dtype, shape=shape, version=version if domain else None
    )


class _Module(nn.Module):
    """A module whose buffers become constants of the file."""

    codes: Tensor
    scales: Tensor
    scale: Tensor
    zero: Tensor
    zeros: Any
    zero_points: Any
    lines: Tensor
    table: Tensor
    columns: Tensor


class _Linear(_Module):
    """A Linear whose product ``multiply`` writes."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.rows, self.cols = layer.out_features, layer.in_features
        self.bias = layer.bias
        if layer.columns is not None:
            self.register_buffer("columns", layer.columns.detach().long())

    def forward(self, x: Tensor) -> Tensor:
        if hasattr(self, "columns"):
            x = x.index_select(-1, self.columns)
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias

    def multiply(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class NBits(_Linear):
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
        y: Tensor = _symbolic(f"{_ORT}::MatMulNBits", inputs, x.dtype, (*x.shape[:-1], self.rows), **self.attributes)
        return y


class Bnb4(_Linear):
    """MatMulBnb4: NF4 in blocks over the flat matrix, with the even element in the high bits."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        weight = layer.weight
        size = block_size(weight.scheme)
        if self.cols % size:
            raise ValueError(
                f"it has {self.cols} columns, and blocks of {size} would reach over rows; use int4 instead"
            )
        self.attributes = {"K": self.cols, "N": self.rows, "block_size": size, "quant_type": 1}
        repeats = (weight.scheme.block[1] or self.cols) // size
        self.register_buffer("codes", (weight.codes >> 4 | weight.codes << 4).flatten())
        self.register_buffer("scales", scales(weight).repeat_interleave(repeats, 1).flatten())

    def multiply(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.rows)
        y: Tensor = _symbolic(
            f"{_ORT}::MatMulBnb4", (x, self.codes, self.scales), x.dtype, shape, **self.attributes
        )  # fmt: skip
        return y


class Fp4Linear(_Linear):
    """GatherBlockQuantized of FP4, then MatMul: ONNX Runtime has no product of FP4 weights on CPUs."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        weight = layer.weight
        self.block = weight.scheme.block[1] or self.cols
        if self.cols % 2:
            raise ValueError(f"it has {self.cols} columns, and two codes share a byte; quantize it with int4 instead")
        self.register_buffer("codes", weight.codes.view(torch.float4_e2m1fn_x2))
        self.register_buffer("scales", scales(weight))
        self.register_buffer("lines", torch.arange(self.rows))

    def multiply(self, x: Tensor) -> Tensor:
        weight = _symbolic(
            f"{_ORT}::GatherBlockQuantized", (self.codes, self.lines, self.scales), x.dtype,
            (self.rows, self.cols), gather_axis=0, quantize_axis=1, block_size=self.block,
        )  # fmt: skip
        result: Tensor = x @ weight.t()
        return result


class DequantizedLinear(_Linear):
    """DequantizeLinear, then MatMul: FP8 with a scale per row or per matrix."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        codes, scale = _weight_of(layer.weight)
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scale)

    def multiply(self, x: Tensor) -> Tensor:
        weight = _symbolic("DequantizeLinear", (self.codes, self.scales), x.dtype, (self.rows, self.cols), axis=0)
        result: Tensor = x @ weight.t()
        return result


def _weight_of(weight: Quantized) -> tuple[Tensor, Tensor]:
    """The codes ``[N, K]`` of 8 bits as ONNX's elements, and a scale per row.

    Integers are uint8 with the zero point 128. ONNX Runtime's products of uint8 and int8 saturate on processors without
    VNNI; those of uint8 are exact.
    """
    scale = scales(weight).expand(weight.shape[0], 1).flatten().contiguous()
    if weight.scheme.format.kind == "integer":
        return (integers(weight) + _ZERO).to(torch.uint8), scale
    dtype = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[weight.scheme.format.name]
    return weight.codes.view(dtype), scale


def _zeros(codes: Tensor, scale: Tensor) -> Tensor:
    """The zero point of each row."""
    return torch.full_like(scale, _ZERO if codes.dtype == torch.uint8 else 0).to(codes.dtype)


class Dynamic(_Linear):
    """MatMulInteger: inputs of 8 bits with a scale per row, computed at run time, and weights of 8 bits."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        codes, scale = _weight_of(layer.weight)
        self.register_buffer("codes", codes.t().contiguous())
        self.register_buffer("scales", scale)
        self.register_buffer("zero", torch.tensor(_ZERO, dtype=torch.uint8))
        assert layer.recipe.input is not None
        self.most = float(layer.recipe.input.format.max)

    def multiply(self, x: Tensor) -> Tensor:
        amax = x.abs().amax(-1, keepdim=True)
        scale = torch.where(amax == 0, 1.0, amax / self.most)
        q = ((x / scale).round().clamp(-self.most, self.most) + _ZERO).to(torch.uint8)
        inputs = (q, self.codes, self.zero, self.zero)
        product = _symbolic("MatMulInteger", inputs, torch.int32, (*x.shape[:-1], self.rows))
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
        product = _symbolic("MatMulInteger", inputs, torch.int32, (*x.shape[:-1], self.rows))
        result: Tensor = product.float() * (scale * self.scales)
        return result


class _Rounded(_Module):
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
            if scheme.format.signed:  # QuantizeLinear has one more negative number
                self.lowest = float(given.scale) * scheme.format.qmin
        else:
            self.dtype = torch.float8_e4m3fn
            self.register_buffer("zero", torch.zeros((), dtype=self.dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.lowest is not None:
            x = x.clamp_min(self.lowest)
        q = _symbolic("QuantizeLinear", (x, self.scale, self.zero), self.dtype, x.shape)
        rounded: Tensor = _symbolic("DequantizeLinear", (q, self.scale, self.zero), x.dtype, x.shape)
        return rounded


class Static(_Linear):
    """Explicit QuantizeLinear and DequantizeLinear around a MatMul, which runtimes turn into an integer product."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__(layer)
        codes, scale = _weight_of(layer.weight)
        self.register_buffer("codes", codes.t().contiguous())
        self.register_buffer("scales", scale)
        self.register_buffer("zeros", _zeros(codes, scale))
        self.rounded = _Rounded(layer)

    def multiply(self, x: Tensor) -> Tensor:
        inputs = (self.codes, self.scales, self.zeros)
        weight = _symbolic("DequantizeLinear", inputs, x.dtype, (self.cols, self.rows), axis=1)
        result: Tensor = self.rounded(x) @ weight
        return result


class Conv(_Module):
    """DequantizeLinear of the weight, and of the input if its scale is static, then Conv."""

    def __init__(self, layer: QuantConv) -> None:
        super().__init__()
        linear: Any = layer.linear
        codes, scale = _weight_of(linear.weight)
        self.layer = (layer.window, layer._pads, layer.padding_mode, layer.groups)
        codes = codes.unflatten(1, (*layer.kernel_size, -1)).movedim(-1, 1).contiguous()
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scale)
        self.register_buffer("zeros", _zeros(codes, scale))
        self.bias = linear.bias
        self.rounded = _Rounded(linear) if linear.recipe.static else None
        self.conv: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[len(layer.kernel_size) - 1]

    def forward(self, x: Tensor) -> Tensor:
        window, pads, mode, groups = self.layer
        if self.rounded is not None:
            x = self.rounded(x)
        if any(pads):
            x = F.pad(x, pads, mode="constant" if mode == "zeros" else mode)
        inputs = (self.codes, self.scales, self.zeros)
        weight = _symbolic("DequantizeLinear", inputs, x.dtype, self.codes.shape, axis=0)
        return self.conv(x, weight, self.bias, window.stride, 0, window.dilation, groups)


class Embedding(_Module):
    """GatherBlockQuantized for integers and FP4; Gather, a table and a product for other formats."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        weight: Quantized = layer.weight
        self.width, format = int(weight.shape[1]), weight.scheme.format
        self.block = 0
        if format.kind == "integer" and not self.width % block_size(weight.scheme):
            stored = blocks(weight)
            self.bits, self.block = stored.bits, stored.block
            self.register_buffer("codes", stored.codes.flatten(1))
            self.register_buffer("scales", stored.scales)
            self.register_buffer("zero_points", stored.zero_points)
            return
        table = torch.tensor([format.value(code) for code in range(1 << format.bits)])
        self.register_buffer("codes", unpack(weight.codes, format.bits, self.width))
        self.register_buffer("scales", scales(weight))
        self.register_buffer("table", table)
        zero = weight.zero_point
        self.register_buffer("zeros", None if zero is None else zero.float() - (format.qmin if format.signed else 0))
        self.group = weight.scheme.block[1] or self.width

    def forward(self, ids: Tensor) -> Tensor:
        if self.block:
            inputs = (self.codes, ids, self.scales, *(() if self.zero_points is None else (self.zero_points,)))
            rows: Tensor = _symbolic(
                f"{_ORT}::GatherBlockQuantized", inputs, torch.float32, (*ids.shape, self.width),
                gather_axis=0, quantize_axis=1, block_size=self.block, bits=self.bits,
            )  # fmt: skip
            return rows
        values = self.table[self.codes[ids].long()]
        scale, zeros = self.scales[ids], None if self.zeros is None else self.zeros[ids]
        wide = scale.repeat_interleave(self.group, -1)[..., : self.width]
        if zeros is not None:
            values = values - zeros.repeat_interleave(self.group, -1)[..., : self.width]
        return values * wide
