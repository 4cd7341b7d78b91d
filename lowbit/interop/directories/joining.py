"""Rows of quantized matrices, and matrices below each other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowbit.tensor.quantized import Quantized

__all__ = ["joined", "rows"]


def rows(weight: Quantized, begin: int, end: int) -> Quantized:
    """Rows of a weight ``[N, K]``. Blocks must not be divided."""
    if (begin, end) == (0, weight.shape[0]):
        return weight
    block = weight.scheme.block[0]
    lines = slice(None) if block is None else slice(begin // block, -(-end // block))
    zero = None if weight.zero_point is None else weight.zero_point[lines]
    shape = torch.Size((end - begin, weight.shape[1]))
    return Quantized(
        weight.codes[begin:end], weight.scale[lines], zero, weight.global_scale, weight.scheme, shape, weight.dtype
    )


def joined(weights: Sequence[Quantized]) -> Quantized:
    """Weights of one scheme below each other. Raises ValueError if that needs two scales where the scheme has one."""
    first = weights[0]
    block = first.scheme.block[0]
    if len(weights) == 1:
        return first
    shared = [first.global_scale] if block is not None else [first.scale, first.global_scale]
    for weight in weights[1:]:
        other = [weight.global_scale] if block is not None else [weight.scale, weight.global_scale]
        if any(a is not None and b is not None and not torch.equal(a, b) for a, b in zip(shared, other, strict=True)):
            raise ValueError("matrices that one matmul computes have different scales of the whole matrix")
    if block is not None and any(weight.shape[0] % block for weight in weights[:-1]):
        raise ValueError(f"matrices that one matmul computes end within a block of {block} rows")
    zeros = [weight.zero_point for weight in weights if weight.zero_point is not None]
    return Quantized(
        torch.cat([weight.codes for weight in weights]),
        first.scale if block is None else torch.cat([weight.scale for weight in weights]),
        torch.cat(zeros) if zeros else None,
        first.global_scale,
        first.scheme,
        torch.Size((sum(int(weight.shape[0]) for weight in weights), first.shape[1])),
        first.dtype,
    )
