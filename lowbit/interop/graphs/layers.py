"""Modules that take the place of quantized layers during an export, in operations that all formats have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.interop.graphs.weights import code_numbers, groups, row_scales
from lowbit.nn.conv import QuantConv
from lowbit.nn.linear import QuantLinear
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import decomposed_ops

__all__ = [
    "FLOAT8", "Cast", "Convolution", "Float8Input", "Layer", "LinearLayer", "Product", "RowInput", "Table",
    "TensorInput", "as_kernel", "dynamic_scale",
]  # fmt: skip


#: torch's dtypes of FP8 formats.
FLOAT8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Layer(nn.Module):
    """A module whose buffers become constants of the graph.

    Models read attributes of their layers, such as ``stride`` or ``weight.dtype``. ``like`` answers for those.
    """

    codes: Tensor
    scales: Tensor
    scale: Tensor
    zero: Tensor
    zeros: Any
    zero_points: Any
    lines: Tensor
    table: Tensor
    columns: Any

    def stand_for(self, layer: nn.Module) -> Layer:
        """Take the place of a quantized layer. Returns itself."""
        self.__dict__["like"] = layer  # not a submodule
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_") or "like" not in self.__dict__:
                raise
            return getattr(self.__dict__["like"], name)


class LinearLayer(Layer):
    """A Linear whose product ``multiply`` writes."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.rows, self.cols = layer.out_features, layer.in_features
        self.bias = layer.bias
        order = layer.columns
        self.register_buffer("columns", None if order is None else order.detach().long())

    def forward(self, x: Tensor) -> Tensor:
        if self.columns is not None:
            x = x.index_select(-1, self.columns)
        y = self.multiply(x)
        return y if self.bias is None else y + self.bias

    def multiply(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def as_kernel(codes: Tensor, layer: QuantConv) -> Tensor:
    """Codes ``[O, taps * C / groups]`` as ``[O, C / groups, *kernel]``."""
    kernel: Tensor = codes.unflatten(1, (*layer.kernel_size, -1)).movedim(-1, 1).contiguous()
    return kernel


class Product(LinearLayer):
    """A Linear whose weight and inputs two modules write.

    Args:
        layer: The layer.
        decoded: Writes the weight ``[N, K]``.
        rounded: Writes the rounding of inputs; None: they stay floats.
    """

    def __init__(self, layer: QuantLinear, decoded: nn.Module, rounded: nn.Module | None = None) -> None:
        super().__init__(layer)
        self.decoded, self.rounded = decoded, rounded

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(x if self.rounded is None else self.rounded(x), self.decoded())


class Convolution(Layer):
    """A convolution whose weight ``[O, C / groups, *kernel]`` and inputs two modules write.

    Args:
        layer: The layer.
        decoded: Writes the weight.
        rounded: Writes the rounding of inputs; None: they stay floats.
    """

    def __init__(self, layer: QuantConv, decoded: nn.Module, rounded: nn.Module | None = None) -> None:
        super().__init__()
        self.geometry = (layer.window, layer._pads, layer.padding_mode, layer.groups)
        self.bias, self.decoded, self.rounded = layer.bias, decoded, rounded
        self.conv: Callable[..., Tensor] = (F.conv1d, F.conv2d, F.conv3d)[len(layer.kernel_size) - 1]

    def forward(self, x: Tensor) -> Tensor:
        window, pads, mode, groups = self.geometry
        if self.rounded is not None:
            x = self.rounded(x)
        if any(pads):
            x = F.pad(x, pads, mode="constant" if mode == "zeros" else mode)
        y: Tensor = self.conv(x, self.decoded(), self.bias, window.stride, 0, window.dilation, groups)
        return y


class Cast(Layer):
    """FP8 weights as tensors of torch's dtype, with a scale per group of columns."""

    def __init__(self, weight: Quantized, conv: QuantConv | None = None) -> None:
        super().__init__()
        codes = weight.codes.view(FLOAT8[weight.scheme.format.name])
        if conv is None:
            stored = groups(weight)
            self.shape = codes.shape
            self.register_buffer("codes", codes.unflatten(1, (-1, stored.size)))
            self.register_buffer("scales", stored.scales)
            return
        kernel = as_kernel(codes, conv)
        self.shape = kernel.shape
        self.register_buffer("codes", kernel)
        self.register_buffer("scales", row_scales(weight).view(-1, *[1] * (kernel.dim() - 1)))

    def forward(self) -> Tensor:
        return (self.codes.float() * self.scales).reshape(self.shape)


class TensorInput(Layer):
    """``quantize_per_tensor`` and ``dequantize_per_tensor`` of inputs with a static scale."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        scheme, given = layer.recipe.input, layer.input_scales
        assert scheme is not None and given is not None
        format, zero = scheme.format, given.zero_point
        self.arguments = (
            float(given.scale), 0 if zero is None else int(zero), int(format.qmin), int(format.qmax),
            torch.int8 if format.signed else torch.uint8,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        codes = decomposed_ops().quantize_per_tensor(x, *self.arguments)
        rounded: Tensor = decomposed_ops().dequantize_per_tensor(codes, *self.arguments)
        return rounded


class RowInput(Layer):
    """Inputs rounded to int8 and back in plain operations, with a scale per row that is computed."""

    def forward(self, x: Tensor) -> Tensor:
        scale = dynamic_scale(x, 127.0)
        return (x / scale).round().clamp(-127.0, 127.0) * scale


class Float8Input(Layer):
    """Inputs cast to FP8 and back, with a static scale, or one per row or tensor that is computed.

    Args:
        layer: The layer, with inputs in ``fp8_e4m3:row`` or ``fp8_e4m3:tensor``.
    """

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        scheme = layer.recipe.input
        assert scheme is not None
        self.most, self.by_row = float(scheme.format.max), scheme.block[0] == 1
        scales = layer.input_scales
        self.static = scales is not None
        if scales is not None:
            self.register_buffer("scale", scales.scale.float().reshape(()))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale if self.static else dynamic_scale(x, self.most, self.by_row)
        return (x / scale).clamp(-self.most, self.most).to(torch.float8_e4m3fn).float() * scale


def dynamic_scale(x: Tensor, most: float, by_row: bool = True) -> Tensor:
    """The scale that maps the largest absolute value, of a row or of the tensor, to ``most``; 1 if that is zero."""
    amax = x.abs().amax(-1, keepdim=True) if by_row else x.abs().flatten().amax(0)
    return torch.where(amax == 0, 1.0, amax / most)


class Table(Layer):
    """A weight of any format: rows of codes, a table of values and a product. Codes of 4 bits stay packed."""

    def __init__(self, weight: Quantized) -> None:
        super().__init__()
        width, format, stored = int(weight.shape[1]), weight.scheme.format, groups(weight)
        self.packed, self.shape = format.bits == 4 and not width % 2, (width // stored.size, stored.size)
        self.register_buffer("codes", weight.codes if self.packed else code_numbers(weight))
        self.register_buffer("table", torch.tensor([format.value(code) for code in range(1 << format.bits)]))
        self.register_buffer("scales", stored.scales)
        self.register_buffer("zeros", None if stored.zero_points is None else stored.zero_points.float())

    def forward(self, ids: Tensor | None = None) -> Tensor:
        """The rows ``ids [...]`` of the weight, or all of them."""
        codes, scales, zeros = (
            part if ids is None or part is None else part[ids] for part in (self.codes, self.scales, self.zeros)
        )
        numbers = codes.long()
        if self.packed:
            numbers = torch.stack([numbers % 16, numbers // 16], -1).flatten(-2)
        values = self.table[numbers].unflatten(-1, self.shape)
        if zeros is not None:
            values = values - zeros
        rows: Tensor = (values * scales).flatten(-2)
        return rows
