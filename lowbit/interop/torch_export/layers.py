"""Weights and inputs of quantized layers in torch's own ops."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.interop.graphs.layers import Layer, Table, as_kernel, dynamic_scale
from lowbit.interop.graphs.weights import groups, integers, row_scales
from lowbit.nn.conv import QuantConv
from lowbit.tensor.quantized import Quantized
from lowbit.torch_private import decomposed_ops

__all__ = ["PerChannel", "PerGroup", "PerToken", "per_group"]


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
    """``dequantize_per_channel_group``: integers with a scale per group of columns.

    A code takes a byte, or two with 8 bits and zero points.
    """

    def __init__(self, weight: Quantized) -> None:
        super().__init__()
        format, stored = weight.scheme.format, groups(weight)
        # The op subtracts zero points in the dtype of the codes.
        dtype = torch.int16 if weight.scheme.affine and format.bits > 7 else torch.int8
        self.codes_range = (int(format.qmin), int(format.qmax), dtype, stored.size)
        zeros = torch.zeros_like(stored.scales, dtype=dtype) if stored.zero_points is None else stored.zero_points
        self.register_buffer("codes", integers(weight).to(dtype))
        self.register_buffer("scales", stored.scales.squeeze(-1))
        self.register_buffer("zeros", zeros.squeeze(-1).to(dtype))

    def forward(self) -> Tensor:
        arguments = (self.codes, self.scales, self.zeros, *self.codes_range, torch.float32)
        weight: Tensor = decomposed_ops().dequantize_per_channel_group(*arguments)
        return weight


def per_group(weight: Quantized) -> Layer:
    """The module that writes integers in groups; the op has no groups of one column."""
    return PerGroup(weight) if groups(weight).size > 1 else Table(weight)


class PerToken(Layer):
    """``quantize_per_token`` and ``dequantize_per_token`` of inputs with a scale per row, computed at each call."""

    def forward(self, x: Tensor) -> Tensor:
        scale = dynamic_scale(x, 127.0)
        zero = torch.zeros_like(scale, dtype=torch.int64)
        q = decomposed_ops().quantize_per_token(x, scale, zero, -127, 127, torch.int8)
        rounded: Tensor = decomposed_ops().dequantize_per_token(q, scale, zero, -127, 127, torch.int8, torch.float32)
        return rounded
