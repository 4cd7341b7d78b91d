"""Weights of quantized layers in operations that OpenVINO keeps compressed."""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.interop.graphs.layers import Layer, as_kernel
from lowbit.interop.graphs.weights import code_numbers, groups, integers, row_scales
from lowbit.interop.openvino.constants import HALVES, PREFIX
from lowbit.nn.conv import QuantConv
from lowbit.tensor.quantized import Quantized

__all__ = ["Bytes", "Compressed"]


def _stored(weight: Quantized) -> tuple[str, Tensor, bool, int]:
    """OpenVINO's type, a byte per code, whether these are twice the values, and their zero point."""
    format = weight.scheme.format
    if format.name == "nf4":
        return "nf4", code_numbers(weight), False, 0
    if format.name == "fp4_e2m1":
        values = torch.tensor([2 * format.value(code) for code in range(16)]).to(torch.int8)
        return "f4e2m1", values[code_numbers(weight).long()], True, 0
    numbers = integers(weight)
    if format.bits <= 2:
        zero = 2 if format.signed else 0
        return "u2", (numbers + zero).to(torch.uint8), False, zero
    signed = torch.int8 if format.signed else torch.uint8
    width = 4 if format.bits <= 4 else 8
    return ("i" if format.signed else "u") + str(width), numbers.to(signed), False, 0


def _short(scales: Tensor) -> Tensor:
    """The scales in fp16 if that changes none, else unchanged."""
    half = scales.half()
    return half if torch.equal(half.float(), scales) and torch.equal((2 * half).float(), 2 * scales) else scales


class Compressed(Layer):
    """A constant of codes, Convert, Subtract of zero points, and Multiply by scales per row and group of columns."""

    def __init__(self, weight: Quantized) -> None:
        super().__init__()
        stored, (name, codes, halved, zero) = groups(weight, power_of_two=True), _stored(weight)
        self.rows, self.name = int(weight.shape[0]), f"{PREFIX}{name}"
        self.register_buffer(self.name, codes.unflatten(1, (-1, stored.size)).contiguous())
        self.scales_name = HALVES if halved else "scales"
        self.register_buffer(self.scales_name, _short(stored.scales / 2 if halved else stored.scales))
        zeros = zero if stored.zero_points is None else stored.zero_points + zero
        dtype = torch.int8 if codes.dtype == torch.int8 else torch.uint8
        whole = zeros if isinstance(zeros, Tensor) else torch.full_like(stored.scales, zeros) if zeros else None
        self.register_buffer("zeros", None if whole is None else whole.to(dtype))

    def forward(self) -> Tensor:
        values = self.get_buffer(self.name).float()
        if self.zeros is not None:
            values = values - self.zeros.float()
        return (values * self.get_buffer(self.scales_name).float()).reshape(self.rows, -1)


class Bytes(Layer):
    """An int8 constant, Convert, and Multiply by a scale per row, for integer products."""

    def __init__(self, weight: Quantized, conv: QuantConv | None = None) -> None:
        super().__init__()
        codes = integers(weight).to(torch.int8)
        self.register_buffer("codes", codes if conv is None else as_kernel(codes, conv))
        self.register_buffer("scales", row_scales(weight).view(-1, *[1] * (self.codes.dim() - 1)))

    def forward(self) -> Tensor:
        return self.codes.float() * self.scales
