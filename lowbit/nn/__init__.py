"""Quantized layers, which ``lowbit.convert`` puts into models."""

from lowbit.nn.attention import QuantMultiheadAttention
from lowbit.nn.conv import QuantConv1d, QuantConv2d, QuantConv3d
from lowbit.nn.embedding import QuantEmbedding
from lowbit.nn.experts import QuantExperts
from lowbit.nn.linear import QuantLinear

__all__ = [
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantEmbedding",
    "QuantExperts",
    "QuantLinear",
    "QuantMultiheadAttention",
]
