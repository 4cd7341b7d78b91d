"""Reference of matmuls (section 9)."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.reference.codec import cast, decode, require_subnormals
from lowbit.reference.quantizers import dequantize
from lowbit.reference.scales import scale_value, spread
from lowbit.scaling import Scheme


class Operand(NamedTuple):
    """An operand of scaled_mm: a float matrix (``scheme`` None), or codes ``[rows, K]``, one per byte, with scales."""

    data: Tensor
    scheme: Scheme | None = None
    scale: Tensor | None = None
    zero_point: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def factors_out(self) -> bool:
        """Whether each row has one scale and zero point, so that the epilogue can apply the scale."""
        scheme = self.scheme
        return scheme is None or (scheme.scale_shape(*self.data.shape)[1] == 1 and not scheme.minimum)

    def values(self, scaled: bool) -> Tensor:
        """fp64 matrix of the operand's values, without the scale unless ``scaled``."""
        if self.scheme is None or self.scale is None:
            return self.data.double()
        if scaled:
            return dequantize(
                self.data, self.scheme, self.scale, self.zero_point, self.global_scale, torch.float32
            ).double()
        value = decode(self.data, self.scheme.format).double()
        if self.zero_point is None:
            return value
        return value - spread(self.zero_point.double(), self.scheme.block_of(*self.data.shape), *self.data.shape)

    def element_scales(self) -> Tensor:
        """fp32 ``[rows, K]``: the scale of each element, including the global scale."""
        assert self.scheme is not None and self.scale is not None
        block = self.scheme.block_of(*self.data.shape)
        return spread(scale_value(self.scale, self.scheme, self.global_scale), block, *self.data.shape)

    def row_scale(self) -> Tensor:
        """fp32 ``[rows, 1]``: the scale of each row, if ``factors_out``."""
        rows = self.data.shape[0]
        if self.scheme is None or self.scale is None:
            return torch.ones(rows, 1, device=self.data.device)
        return spread(
            scale_value(self.scale, self.scheme, self.global_scale), self.scheme.block_of(*self.data.shape), rows, 1
        )


#: Maximum length of a segment of an integer matmul, and minimum length of blocks along K for one.
SEGMENT, MIN_INTEGER_BLOCK = 512, 8


def integer_segments(a: Operand, b: Operand) -> list[int] | None:
    """Starts of the segments of an integer matmul, and K at the end; None for matmuls that are summed as floats."""
    cols, blocks = a.data.shape[1], []
    for x in (a, b):
        if x.scheme is None or x.scheme.format.kind != "integer" or x.scheme.minimum:
            return None
        if not x.factors_out:
            blocks.append(x.scheme.block_of(*x.data.shape)[1])
    if any(block < MIN_INTEGER_BLOCK for block in blocks):
        return None
    edges = sorted({0, cols}.union(*(range(0, cols, block) for block in blocks)))
    if not blocks:
        return edges
    return [k for begin, end in pairwise(edges) for k in range(begin, end, SEGMENT)] + [cols]


def _sum_of_integers(a: Operand, b: Operand, edges: list[int]) -> Tensor:
    """fp32 sum over segments, in the order of K, of exact integer sums times scales."""
    left, right = a.values(False), b.values(False)
    a_scale, b_scale = (x.element_scales() for x in (a, b))
    total = torch.zeros(left.shape[0], right.shape[0], device=left.device)
    for begin, end in pairwise(edges):
        exact = (left[:, begin:end] @ right[:, begin:end].T).float()
        total = total + exact * (a_scale[:, begin, None] * b_scale[:, begin])
    return total


def scaled_mm(a: Operand, b: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``a [M, K] @ b [N, K].T``: exact products summed in fp64, then scales, bias and cast in fp32, in this order.

    Integers whose scales change along K are summed exactly within each segment. NaN is canonical.
    """
    require_subnormals(a.data)
    whole = a.factors_out and b.factors_out
    edges = integer_segments(a, b)
    if edges is not None and not whole:
        total = _sum_of_integers(a, b, edges)
    else:
        total = (a.values(not whole) @ b.values(not whole).T).float()
    total = total + 0.0  # turns -0 into +0, because sums start at +0
    if whole:
        total = total * (a.row_scale() * b.row_scale().T)
    if bias is not None:
        total = total + bias.float()
    return cast(total.masked_fill(total.isnan(), torch.nan), dtype)
