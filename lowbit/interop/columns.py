"""Columns in the order of activations: ``g_idx``, the group of each column, as the order of a QuantLinear's columns."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.scaling import Scheme
from lowbit.tensor.packing import pack, unpack
from lowbit.tensor.quantized import Quantized

__all__ = ["in_order", "order_of", "taken", "to_groups"]


def order_of(groups: Tensor, scheme: Scheme) -> Tensor:
    """The order in which the columns of a group are neighbors, int32 ``[K]``.

    Args:
        groups: The group of each column, integers ``[K]``.
        scheme: The scheme of the weight.

    Raises:
        ValueError: A group has another number of columns than the scheme.
    """
    cols = len(groups)
    size = scheme.block[1] or cols
    expected = torch.arange(cols, device=groups.device) // size
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), expected):
        raise ValueError(f"g_idx is damaged: expected groups of {size} columns each; copy the file again")
    return order.to(torch.int32)


def to_groups(columns: Tensor, scheme: Scheme) -> Tensor:
    """The group of each column, int32 ``[K]``: the inverse of ``order_of``."""
    size = scheme.block[1] or len(columns)
    groups = torch.arange(len(columns), dtype=torch.int32, device=columns.device) // size
    return torch.empty_like(groups).index_copy_(0, columns.long(), groups)


def taken(weight: Quantized, columns: Tensor) -> Quantized:
    """The weight with the codes of these columns, in their order. Scales stay."""
    bits, cols = weight.scheme.format.bits, int(weight.shape[1])
    codes = unpack(weight.codes, bits, cols).index_select(1, columns)
    return replace(weight, codes=pack(codes, bits))


def in_order(weight: Quantized, columns: Tensor) -> Quantized:
    """The inverse of ``taken``."""
    return taken(weight, columns.argsort())
