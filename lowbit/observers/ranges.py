"""Ranges: statistics of a layer's inputs, from which static ranges are computed."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowbit.dist_utils import gathered, processes
from lowbit.functional.quantizers import quantize
from lowbit.scaling import Scheme
from lowbit.tensor.quantized import Scales

__all__ = ["MOMENTUM", "Ranges"]

#: Bins of a histogram over [-R, R]. R is a power of two: when it doubles, pairs of bins are merged exactly.
BINS = 8192

#: Weight of a batch's extremes in the moving average.
MOMENTUM = 0.01


class Ranges:
    """Statistics of inputs ``[..., cols]``, for each block of columns with a static scale. The size is constant.

    Args:
        scheme: the scheme of the inputs, with static scales.
        cols: number of columns.
        histogram: also count values in a histogram.
        device: device of the statistics.

    Attributes:
        low: smallest value of each block of columns.
        high: largest value of each block of columns.
        average: moving average over batches of the smallest and the largest value, ``[2, blocks]``; None before the
            first.
        counts: histogram ``[bins, blocks]``, or None.
    """

    def __init__(self, scheme: Scheme, cols: int, *, histogram: bool, device: torch.device | str = "cpu") -> None:
        self.scheme, self.cols = scheme, cols
        self.width = cols if scheme.block[1] is None else scheme.block[1]
        blocks = scheme.scale_shape(0, cols)[1]
        self.low = torch.full((blocks,), math.inf, device=device)
        self.high = torch.full((blocks,), -math.inf, device=device)
        self.average: Tensor | None = None
        self.counts = torch.zeros(BINS, blocks, dtype=torch.float64, device=device) if histogram else None
        self.exponent = -126  # R = 2 ** exponent

    def update(self, x: Tensor) -> None:
        """Add the rows of a batch. With several processes, all must call it equally often."""
        x = x.detach().reshape(-1, self.cols).float()
        blocks = len(self.low)
        if not x.numel():
            return
        filled = F.pad(x, (0, blocks * self.width - self.cols), mode="replicate").view(-1, blocks, self.width)
        low, high = filled.amin((0, 2)), filled.amax((0, 2))
        self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        self._average(torch.stack([low, high]))
        if self.counts is not None:
            self._count(x)

    def _average(self, ends: Tensor) -> None:
        for batch in gathered(ends):
            self.average = batch if self.average is None else self.average + MOMENTUM * (batch - self.average)

    def _count(self, x: Tensor) -> None:
        assert self.counts is not None
        self._widen(math.frexp(float(x.abs().max()))[1])
        bins = ((x * (BINS / 2 / 2.0**self.exponent)).floor().long() + BINS // 2).clamp_(0, BINS - 1)
        block = torch.arange(self.cols, device=x.device) // self.width
        flat = (bins * len(self.low) + block).flatten()
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)

    def _widen(self, exponent: int) -> None:
        """Extend the histogram to 2 ** exponent."""
        assert self.counts is not None
        while self.exponent < exponent and bool(self.counts.any()):
            merged = torch.zeros_like(self.counts)
            merged[BINS // 4 : BINS - BINS // 4] = self.counts.view(BINS // 2, 2, -1).sum(1)
            self.counts, self.exponent = merged, self.exponent + 1
        self.exponent = max(self.exponent, exponent)

    def reduce(self) -> None:
        """Combine the statistics of all processes of ``torch.distributed``."""
        if processes() == 1:
            return
        dist.all_reduce(self.low, dist.ReduceOp.MIN)
        dist.all_reduce(self.high, dist.ReduceOp.MAX)
        if self.counts is not None:
            exponent = torch.tensor(self.exponent, device=self.low.device)
            dist.all_reduce(exponent, dist.ReduceOp.MAX)
            self._widen(int(exponent))
            dist.all_reduce(self.counts)

    # -- from a range -------------------------------------------------------------------------------------------------
    def scales(self, low: Tensor, high: Tensor) -> Scales:
        """The scales for ranges from ``low`` to ``high``, one per block of columns."""
        ends = torch.stack([low, high]).repeat_interleave(self.width, 1)[:, : self.cols]
        return Scales.of(quantize(ends, self.scheme))

    @property
    def centers(self) -> Tensor:
        """The centers of the bins, fp32 ``[bins]``."""
        return (torch.arange(BINS, dtype=torch.float32) + 0.5 - BINS / 2) * (2.0**self.exponent / (BINS / 2))
