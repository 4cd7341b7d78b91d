"""Sums of squares of matrix rows and columns, bit-identical in any order and on any sharding.

Every term is an integer: a square relative to the largest one of its row (or column), by the op ``square_sums``.
Integer sums are exact, so the sums of all processes add up to those of the full matrix.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lowbit.op_calls import call
from lowbit.ops.optim import SQUARE_BITS
from lowbit.optim.shards import Part

__all__ = ["Matrix"]

#: Schemes whose blocks are the rows (0) or columns (1) of a matrix.
_LINES = ("int8:row", "int8:col")


class Matrix:
    """A parameter as the matrix ``[D0, rest]``, with the rows and columns of this process."""

    def __init__(self, part: Part) -> None:
        shape = part.shape
        self.part, self.rows, self.cols = part, shape[0], max(torch.Size(shape[1:]).numel(), 1)
        cols = torch.arange(self.cols).view(shape[1:] or (1,))
        for axis, cut in part.cuts.items():
            if axis > 0:
                cols = cols.narrow(axis - 1, cut.start, cut.length)
        first = part.cuts.get(0)
        self._indices = (
            torch.arange(self.rows) if first is None else torch.arange(first.start, first.start + first.length),
            cols.reshape(-1),
        )

    def of(self, shard: Tensor) -> Tensor:
        """A shard of the tensor as a matrix."""
        return shard.reshape(len(self._indices[0]), len(self._indices[1]))

    def here(self, vector: Tensor, axis: int) -> Tensor:
        """The elements for this process, of a vector over all rows (axis 0) or columns (axis 1)."""
        return vector[self._indices[axis].to(vector.device)]

    def squares(self, shard: Tensor, axes: Sequence[int] = (0, 1)) -> list[Tensor]:
        """fp64 sums of squares of all rows (axis 0) and columns (axis 1), from fp32 or 16-bit shards."""
        tops = [self._reduced(_amax(shard, axis), axis, dist.ReduceOp.MAX) for axis in axes]
        exponents = [torch.frexp(top)[1] for top in tops]
        sums = [
            self._reduced(call("square_sums", shard, self.here(e, axis), axis), axis, dist.ReduceOp.SUM)
            for axis, e in zip(axes, exponents, strict=True)
        ]
        return [
            torch.where(top.isfinite(), torch.ldexp(total.double(), 2 * e - SQUARE_BITS), torch.nan)
            for total, e, top in zip(sums, exponents, tops, strict=True)
        ]

    def _reduced(self, values: Tensor, axis: int, op: dist.ReduceOp.RedOpType) -> Tensor:
        """The vector over all rows or columns, reduced over processes from the ``values`` of each."""
        full = values.new_zeros((self.rows, self.cols)[axis])
        full[self._indices[axis].to(values.device)] = values
        for group in self.part.groups:
            dist.all_reduce(full, op, group)
        return full


def _amax(shard: Tensor, axis: int) -> Tensor:
    """Largest magnitude of each row (axis 0) or column (axis 1). NaN becomes Inf, since a maximum by gloo drops NaN."""
    if not shard.numel():
        return shard.new_zeros(shard.shape[axis], dtype=torch.float32)
    if shard.shape[1 - axis] == 1:
        tops = shard.abs().float()
    else:
        low, high = call("block_range", shard, _LINES[axis])
        tops = torch.maximum(high, -low)
    return tops.reshape(-1).nan_to_num(torch.inf, torch.inf)
