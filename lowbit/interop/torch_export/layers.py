"""Weights and inputs of quantized layers in torch's own ops."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.interop.graphs.layers import Layer, as_kernel, dynamic_scale
from lowbit.interop.graphs.weights import groups, integers, row_scales
from lowbit.nn.conv import QuantConv
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import decomposed_ops

__all__ = ["PerChannel", "PerGroup", "PerToken"]


class PerChannel(Layer):
    """``dequantize_per_channel``: integers with a scale per row; each takes a byte."""

    def __init__(self, weight: Quantized, conv: QuantConv | None = None) -> None:
        super().__init__()
        codes, format = integers(weight).to(torch.int8), weight.scheme.format
        self.range = (int(format.qmin), int(format.qmax))
        self.register_buffer("codes", codes if conv is None else as_kernel(codes, conv))
        self.register_buffer("scales", row_scales(weight))
        self.register_buffer("zeros", torch.zeros(len(codes), dtype=torch.int64))

    def forward(self) -> Tensor:
        arguments = (self.codes, self.scales, self.zeros, 0, *self.range, torch.int8)
        weight: Tensor = decomposed_ops().dequantize_per_channel(*arguments)
        return weight


class PerGroup(Layer):
    """``dequantize_per_channel_group``: integers with a scale per group of columns; each takes a byte."""

    def __init__(self, weight: Quantized) -> None:
        super().__init__()
        format, stored = weight.scheme.format, groups(weight)
        dtype = torch.int8 if format.qmax <= 127 else torch.int16  # the op subtracts zero points in this dtype
        self.codes_range = (int(format.qmin), int(format.qmax), dtype, stored.size)
        zeros = torch.zeros_like(stored.scales, dtype=dtype) if stored.zero_points is None else stored.zero_points
        self.register_buffer("codes", integers(weight).to(dtype))
        self.register_buffer("scales", stored.scales.squeeze(-1))
        self.register_buffer("zeros", zeros.squeeze(-1).to(dtype))

    def forward(self) -> Tensor:
        arguments = (self.codes, self.scales, self.zeros, *self.codes_range, torch.float32)
        weight: Tensor = decomposed_ops().dequantize_per_channel_group(*arguments)
        return weight


class PerToken(Layer):
    """``quantize_per_token`` and ``dequantize_per_token`` of inputs with a scale per row, computed at each call."""

    def forward(self, x: Tensor) -> Tensor:
        scale = dynamic_scale(x, 127.0)
        zero = torch.zeros_like(scale, dtype=torch.int64)
        q = decomposed_ops().quantize_per_token(x, scale, zero, -127, 127, torch.int8)
        rounded: Tensor = decomposed_ops().dequantize_per_token(q, scale, zero, -127, 127, torch.int8, torch.float32)
        return rounded
