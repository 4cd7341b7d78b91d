"""Rows of quantized matrices, in other orders, and matrices below each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lowbit.tensor.quantized import Quantized

__all__ = ["joined", "rearranged", "rows"]


def rows(weight: Quantized, begin: int, end: int) -> Quantized:
    """Rows of a weight ``[N, K]``. Blocks must not be divided."""
    if (begin, end) == (0, weight.shape[0]):
        return weight
    block = weight.scheme.block[0]
    lines = slice(None) if block is None else slice(begin // block, -(-end // block))
    zero = None if weight.zero_point is None else weight.zero_point[lines]
    outer = weight.global_scale
    if outer is not None and weight.scheme.global_scale == "superblock":
        outer = outer[begin:end]
    shape = torch.Size((end - begin, weight.shape[1]))
    return Quantized(weight.codes[begin:end], weight.scale[lines], zero, outer, weight.scheme, shape, weight.dtype)


def rearranged(weight: Quantized, order: Tensor) -> Quantized:
    """A weight ``[N, K]`` whose scales belong to single rows, with its rows in the order ``order [N]``."""
    return weight.map(lambda part: part[order] if len(part) == len(order) else part)


def joined(weights: Sequence[Quantized]) -> Quantized:
    """Weights of one scheme below each other. Raises ValueError if that needs two scales where the scheme has one."""
    first = weights[0]
    block, outer = first.scheme.block[0], first.scheme.global_scale
    if len(weights) == 1:
        return first
    shared = [part for part, single in (("scale", block is None), ("global_scale", outer == "tensor")) if single]
    if any(not torch.equal(weight.parts[part], first.parts[part]) for weight in weights[1:] for part in shared):
        raise ValueError("matrices that one matmul computes have different scales of the whole matrix")
    if block is not None and any(weight.shape[0] % block for weight in weights[:-1]):
        raise ValueError(f"matrices that one matmul computes end within a block of {block} rows")
    zeros = [weight.zero_point for weight in weights if weight.zero_point is not None]
    outers = [weight.global_scale for weight in weights if weight.global_scale is not None]
    return Quantized(
        torch.cat([weight.codes for weight in weights]),
        first.scale if block is None else torch.cat([weight.scale for weight in weights]),
        torch.cat(zeros) if zeros else None,
        torch.cat(outers) if outer == "superblock" else first.global_scale,
        first.scheme,
        torch.Size((sum(int(weight.shape[0]) for weight in weights), first.shape[1])),
        first.dtype,
    )
