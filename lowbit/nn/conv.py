"""QuantConv2d: a convolution as the product of its patches with one quantized matrix ``[O, I * kh * kw]``."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.nn.base import kind
from lowbit.nn.linear import QuantLinear
from lowbit.tensor.quantized import Quantized

__all__ = ["QuantConv2d"]


class QuantConv2d(nn.Module):
    """``nn.Conv2d`` with ``groups=1`` on a quantized weight: input ``[..., I, H, W]``, result ``[..., O, H', W']``.

    The patches are laid out in memory (``kh * kw`` times the input) and go through ``self.linear``, a QuantLinear.
    """

    @property
    def lowbit_kind(self) -> str:
        """Quantized, or what its matrix is trained to be."""
        return "qat" if kind(self.linear) == "qat" else "quantized"

    def __init__(self, like: nn.Conv2d, linear: QuantLinear) -> None:
        super().__init__()
        self.in_channels, self.out_channels = like.in_channels, like.out_channels
        self.kernel_size, self.stride, self.dilation = like.kernel_size, like.stride, like.dilation
        self.padding, self.padding_mode = like.padding, like.padding_mode
        self._pads: tuple[int, ...] = tuple(like._reversed_padding_repeated_twice)
        self.recipe = linear.recipe
        self.linear = linear

    @property
    def weight(self) -> Quantized:
        """The weight as the matrix ``[O, I * kh * kw]``."""
        return self.linear.weight

    @property
    def bias(self) -> nn.Parameter | None:
        return self.linear.bias

    def forward(self, x: Tensor) -> Tensor:
        if any(self._pads):
            x = F.pad(x, self._pads, mode="constant" if self.padding_mode == "zeros" else self.padding_mode)
        height, width = (
            (size - dilation * (kernel - 1) - 1) // stride + 1
            for size, dilation, kernel, stride in zip(
                x.shape[-2:], self.dilation, self.kernel_size, self.stride, strict=True
            )
        )
        patches = F.unfold(x, self.kernel_size, self.dilation, 0, self.stride)
        y: Tensor = self.linear(patches.transpose(-1, -2))
        return y.transpose(-1, -2).reshape(*y.shape[:-2], self.out_channels, height, width)

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, dilation={self.dilation}"
        )
