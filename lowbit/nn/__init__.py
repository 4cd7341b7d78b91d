"""Quantized layers, and the conversion of a model's layers into them."""

from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.conv import QuantConv2d
from lowbit.nn.convert import Conversion, quantize_
from lowbit.nn.linear import QuantLinear

__all__ = ["Conversion", "QuantConv2d", "QuantLinear", "QuantMultiheadAttention", "quantize_"]
