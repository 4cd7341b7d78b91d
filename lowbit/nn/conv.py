"""Quantized convolutions over 1, 2 and 3 axes: one call of the op ``conv``, without materialized patches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear
from lowbit.ops.conv import Window, spans_tensor
from lowbit.tensor.quantized import Quantized

__all__ = ["QuantConv", "QuantConv1d", "QuantConv2d", "QuantConv3d"]


#: The order of the weight's columns, as saved in ``_extra_state``.
_ORDER = b"taps, channels"


class QuantConv(nn.Module):
    """``nn.ConvNd`` with a quantized weight, for input ``[N, C, *S]`` or ``[C, *S]`` and result ``[N, O, *S']``.

    The result has the memory format of the input. Channels-last inputs are read directly, others are copied. Inputs are
    quantized as the op ``conv`` does: with one scale per tensor, or per patch.

    Args:
        like: the convolution to replace.
        linear: a QuantLinear, or the layer that trains or observes one, with the weight as ``[O, taps * C / groups]``.

    Raises:
        ValueError: the recipe has static input scales finer than per tensor or a rotation, or forward got an input of
            another shape.
    """

    @property
    def lowbit_kind(self) -> str:
        """ "qat" while the weight is trained, else "quantized"."""
        return "qat" if kind(self.linear) == "qat" else "quantized"

    def __init__(self, like: nn.Conv1d | nn.Conv2d | nn.Conv3d, linear: QuantLinear) -> None:
        super().__init__()
        self.in_channels, self.out_channels = like.in_channels, like.out_channels
        self.kernel_size, self.stride, self.dilation = like.kernel_size, like.stride, like.dilation
        self.padding, self.padding_mode, self.groups = like.padding, like.padding_mode, like.groups
        self._pads: tuple[int, ...] = tuple(like._reversed_padding_repeated_twice)
        pairs = zip(self._pads[-2::-2], self._pads[::-2], strict=True)
        zeros = (
            tuple(size for pair in pairs for size in pair) if like.padding_mode == "zeros" else (0,) * len(self._pads)
        )
        self.window = Window(self.kernel_size, self.stride, zeros, self.dilation, self.groups)
        self.recipe = linear.recipe
        reason = _refusal(linear, like.groups)
        if reason is not None:
            raise ValueError(f"recipe {linear.recipe.name!r}: {reason}; or leave the layer out with skip=...")
        self.linear = linear

    @property
    def weight(self) -> Quantized:
        """The weight as the matrix ``[O, taps * C / groups]``."""
        return self.linear.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.linear.bias

    def forward(self, input: Tensor) -> Tensor:
        axes = len(self.kernel_size)
        if input.dim() not in (axes + 1, axes + 2) or input.shape[-axes - 1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__}: expected an input [N, C, *S] or [C, *S] with C={self.in_channels} and {axes} "
                f"axes S, got {list(input.shape)}"
            )
        images = input if input.dim() == axes + 2 else input[None]
        if self.padding_mode != "zeros" and any(self._pads):
            images = F.pad(images, self._pads, mode=self.padding_mode)
        pixels = images.movedim(1, -1)
        y: Tensor = self.linear.conv(pixels, self.window).movedim(-1, 1)
        if images.stride(1) != 1 or not pixels.is_contiguous():
            y = y.contiguous()
        return y if input.dim() == axes + 2 else y[0]

    def get_extra_state(self) -> Tensor:
        """The order of the weight's columns."""
        return torch.tensor(list(_ORDER), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Raise ValueError for a weight with another order of columns."""
        if bytes(state.tolist()) != _ORDER:
            raise ValueError("the state has a convolution's columns in another order than [taps, channels]")

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}, groups={self.groups}"
        )


def _refusal(linear: QuantLinear, groups: int) -> str | None:
    """The reason why the recipe cannot be used for a convolution, with a remedy; None if it can."""
    input = linear.recipe.input
    if linear.recipe.rotation is not None:
        return "a convolution does not go through a Hadamard transform"
    if linear.recipe.reordered:
        return "a convolution has its columns in the order of its window"
    if input is None or spans_tensor(input):
        return None
    instead = f"use {input.format.name}:tensor for its input"
    if linear.recipe.static:
        return f"a convolution has one static input scale, and {input} has several; {instead}"
    if kind(linear) == "qat" and groups > 1:
        return f"training a convolution in groups needs one input scale, and {input} has several; {instead}"
    return None


class QuantConv1d(QuantConv):
    """``nn.Conv1d`` on a quantized weight."""


class QuantConv2d(QuantConv):
    """``nn.Conv2d`` on a quantized weight."""


class QuantConv3d(QuantConv):
    """``nn.Conv3d`` on a quantized weight."""
