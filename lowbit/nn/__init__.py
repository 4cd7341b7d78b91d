"""Quantized layers. ``lowbit.convert`` puts them into models."""

from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.conv import QuantConv2d
from lowbit.nn.linear import QuantLinear

__all__ = ["QuantConv2d", "QuantLinear", "QuantMultiheadAttention"]
