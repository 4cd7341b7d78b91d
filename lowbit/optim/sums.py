"""Sums of squares of the rows and columns of a matrix that no order of adding and no sharding changes.

Every term is an integer: a square relative to the largest of its row (or column), by the op ``square_sums``. Integers
add exactly, so each process adds its own and their sums are those of the whole matrix.
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
    """A parameter as the matrix ``[D0, rest]``: which of its rows and columns this process holds."""

    def __init__(self, part: Part) -> None:
        shape = part.shape
        self.part, self.rows, self.cols = part, shape[0], max(torch.Size(shape[1:]).numel(), 1)
        held = torch.arange(self.cols).view(shape[1:] or (1,))
        for axis, cut in part.cuts.items():
            if axis > 0:
                held = held.narrow(axis - 1, cut.start, cut.length)
        first = part.cuts.get(0)
        self._places = (
            torch.arange(self.rows) if first is None else torch.arange(first.start, first.start + first.length),
            held.reshape(-1),
        )

    def of(self, x: Tensor) -> Tensor:
        """What this process holds of the matrix, from what it holds of the tensor."""
        return x.reshape(len(self._places[0]), len(self._places[1]))

    def here(self, vector: Tensor, axis: int) -> Tensor:
        """The elements of a vector over all rows (axis 0) or columns (1) that are of this process' ones."""
        return vector[self._places[axis].to(vector.device)]

    def squares(self, mine: Tensor, axes: Sequence[int] = (0, 1)) -> list[Tensor]:
        """fp64 sums of squares of all rows (0) and columns (1); ``mine``: fp32 or 16 bits, of this process."""
        tops = [self._reduced(_amax(mine, axis), axis, dist.ReduceOp.MAX) for axis in axes]
        exponents = [torch.frexp(top)[1] for top in tops]
        wholes = [
            self._reduced(call("square_sums", mine, self.here(e, axis), axis), axis, dist.ReduceOp.SUM)
            for axis, e in zip(axes, exponents, strict=True)
        ]
        return [
            torch.where(top.isfinite(), torch.ldexp(whole.double(), 2 * e - SQUARE_BITS), torch.nan)
            for whole, e, top in zip(wholes, exponents, tops, strict=True)
        ]

    def _reduced(self, mine: Tensor, axis: int, how: dist.ReduceOp.RedOpType) -> Tensor:
        """A vector over all rows or columns, from each process' part of it; the order of processes does not matter."""
        full = mine.new_zeros((self.rows, self.cols)[axis])
        full[self._places[axis].to(mine.device)] = mine
        for group in self.part.groups:
            dist.all_reduce(full, how, group)
        return full


def _amax(mine: Tensor, axis: int) -> Tensor:
    """The largest magnitude of each row (0) or column (1); Inf where NaN is among them, whose maximum gloo loses."""
    if not mine.numel():
        return mine.new_zeros(mine.shape[axis], dtype=torch.float32)
    if mine.shape[1 - axis] == 1:
        tops = mine.abs().float()
    else:
        low, high = call("block_range", mine, _LINES[axis])
        tops = torch.maximum(high, -low)
    return tops.reshape(-1).nan_to_num(torch.inf, torch.inf)
