"""Static scales for activations: what is kept of the numbers that a layer is given, and which range is made of it.

The scale and the zero point of a range are those that ``quantize`` makes of its two ends, so that there is one rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lowbit.functional import fake_quantize, quantize
from lowbit.named import spelled
from lowbit.scaling import Scheme, scheme
from lowbit.tensor.quantized import Scales

__all__ = ["MOMENTUM", "OBSERVERS", "Observer", "Ranges", "everywhere", "find_observer", "processes"]

#: Bins of a histogram over [-R, R], R a power of two: when R doubles, bins are merged by twos, and nothing is lost.
_BINS = 8192

#: How much of a batch's extremes a moving average takes.
MOMENTUM = 0.01

#: The fractions of the whole range that are tried, and the share of numbers that a percentile keeps.
_FRACTIONS, _PERCENT = tuple(k / 128 for k in range(8, 129)), 99.99


class Ranges:
    """Of numbers ``[..., cols]``, for each block of columns that has a static scale: the extremes, their moving average
    over batches, and where ``histogram`` is set how often which numbers come. Its size does not depend on the batches.
    """

    def __init__(self, scheme: Scheme, cols: int, *, histogram: bool, device: torch.device | str = "cpu") -> None:
        self.scheme, self.cols = scheme, cols
        self.width = cols if scheme.block[1] is None else scheme.block[1]
        blocks = scheme.scale_shape(0, cols)[1]
        self.low = torch.full((blocks,), math.inf, device=device)
        self.high = torch.full((blocks,), -math.inf, device=device)
        self.average: Tensor | None = None
        self.counts = torch.zeros(_BINS, blocks, dtype=torch.float64, device=device) if histogram else None
        self.exponent = -126  # R = 2 ** exponent

    def update(self, x: Tensor) -> None:
        """Add the rows of a batch. In several processes all must call it equally often."""
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
        for one in _gathered(ends):
            self.average = one if self.average is None else self.average + MOMENTUM * (one - self.average)

    def _count(self, x: Tensor) -> None:
        assert self.counts is not None
        self._widen(math.frexp(float(x.abs().max()))[1])
        bins = ((x * (_BINS / 2 / 2.0**self.exponent)).floor().long() + _BINS // 2).clamp_(0, _BINS - 1)
        block = torch.arange(self.cols, device=x.device) // self.width
        flat = (bins * len(self.low) + block).flatten()
        self.counts += torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)

    def _widen(self, exponent: int) -> None:
        """Let the histogram reach to 2 ** exponent."""
        assert self.counts is not None
        while self.exponent < exponent and bool(self.counts.any()):
            merged = torch.zeros_like(self.counts)
            merged[_BINS // 4 : _BINS - _BINS // 4] = self.counts.view(_BINS // 2, 2, -1).sum(1)
            self.counts, self.exponent = merged, self.exponent + 1
        self.exponent = max(self.exponent, exponent)

    def reduce(self) -> None:
        """Add what the other processes of ``torch.distributed`` have seen."""
        if processes() == 1:
            return
        dist.all_reduce(self.low, dist.ReduceOp.MIN)
        dist.all_reduce(self.high, dist.ReduceOp.MAX)
        if self.counts is not None:
            exponent = torch.tensor(self.exponent)
            dist.all_reduce(exponent, dist.ReduceOp.MAX)
            self._widen(int(exponent))
            dist.all_reduce(self.counts)

    # -- of a range ---------------------------------------------------------------------------------------------------
    def scales(self, low: Tensor, high: Tensor) -> Scales:
        """The scales of the ranges from ``low`` to ``high``, one a block of columns."""
        ends = torch.stack([low, high]).repeat_interleave(self.width, 1)[:, : self.cols]
        return Scales.of(quantize(ends, self.scheme))

    @property
    def centers(self) -> Tensor:
        """The numbers in the middle of the bins: fp32 ``[bins]``."""
        return (torch.arange(_BINS, dtype=torch.float32) + 0.5 - _BINS / 2) * (2.0**self.exponent / (_BINS / 2))


class Observer(NamedTuple):
    """How a static range follows from what was seen: ``range(ranges)`` gives the lower and upper ends."""

    name: str
    about: str
    range: Callable[[Ranges], tuple[Tensor, Tensor]]
    histogram: bool = False


def _extremes(seen: Ranges) -> tuple[Tensor, Tensor]:
    return seen.low, seen.high


def _average(seen: Ranges) -> tuple[Tensor, Tensor]:
    assert seen.average is not None
    return seen.average[0], seen.average[1]


def _percentile(percent: float) -> Callable[[Ranges], tuple[Tensor, Tensor]]:
    def ends(seen: Ranges) -> tuple[Tensor, Tensor]:
        assert seen.counts is not None
        share = seen.counts.cumsum(0) / seen.counts.sum(0)
        cut = (1 - percent / 100) / 2
        step = 2.0**seen.exponent / (_BINS / 2)
        first = (share <= cut).sum(0)  # bins that lie wholly below
        last = (share < 1 - cut).sum(0)
        low = (first - _BINS / 2) * step
        high = (last + 1 - _BINS / 2) * step
        return torch.maximum(low.float(), seen.low), torch.minimum(high.float(), seen.high)

    return ends


def _squared(centers: Tensor, counts: Tensor, decoded: Tensor, inside: Tensor) -> Tensor:
    return ((centers - decoded).square() * counts).sum(0)


def _divergence(centers: Tensor, counts: Tensor, decoded: Tensor, inside: Tensor) -> Tensor:
    """KL divergence of the numbers with those outside at the ends of the range, from the bins of a code evened out.
    Zeros, which every range has a code for, count no more than the numbers beside them.

    Source: the calibration of TensorRT, S. Migacz, GTC 2017, and of pytorch-quantization, where ReLU's zeros are left
    out.
    """
    zero = len(counts) // 2
    counts = counts.clone()
    counts[zero] = torch.minimum(counts[zero], torch.maximum(counts[zero - 1], counts[zero + 1]))
    kept = counts * inside
    bins = torch.arange(len(counts), device=counts.device)[:, None].expand_as(counts)
    last = torch.where(inside, bins, -1).amax(0, keepdim=True).clamp(min=0)
    first = torch.where(inside, bins, len(counts)).amin(0, keepdim=True).clamp(max=len(counts) - 1)
    p = kept.clone()
    p.scatter_add_(0, last, (counts * (bins > last)).sum(0, keepdim=True))
    p.scatter_add_(0, first, (counts * (bins < first)).sum(0, keepdim=True))
    code = torch.cat([torch.zeros_like(bins[:1]), (decoded[1:] != decoded[:-1]).long()]).cumsum(0)
    mass = torch.zeros_like(kept).scatter_add_(0, code, kept).gather(0, code)
    used = torch.zeros_like(kept).scatter_add_(0, code, (kept > 0).double()).gather(0, code)
    q = torch.where(kept > 0, mass / used.clamp(min=1), 0.0)
    p, q = p / p.sum(0), (q / q.sum(0).clamp(min=1)).clamp(min=1e-12)
    return torch.where(p > 0, p * (p.clamp(min=1e-300) / q).log(), 0.0).sum(0)


def _least(loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[Ranges], tuple[Tensor, Tensor]]:
    """The fraction of the whole range whose codes lose least."""

    def ends(seen: Ranges) -> tuple[Tensor, Tensor]:
        assert seen.counts is not None
        own = scheme(f"{seen.scheme.format.name}:col" + (":affine" if seen.scheme.affine else ""))
        centers = seen.centers.to(seen.low.device)[:, None].expand(-1, len(seen.low)).contiguous()
        best = torch.full_like(seen.low, math.inf, dtype=torch.float64)
        fraction = torch.ones_like(seen.low)
        for one in reversed(_FRACTIONS):
            low, high = one * seen.low, one * seen.high
            chosen = Scales.of(quantize(torch.stack([low, high]), own))
            decoded = fake_quantize(centers, own, *chosen)
            reach = low if seen.scheme.affine else torch.minimum(low, -high)
            inside = (centers >= reach) & (centers <= (high if seen.scheme.affine else -reach))
            found = loss(centers.double(), seen.counts, decoded.double(), inside)
            less = found < best
            best, fraction = torch.where(less, found, best), torch.where(less, one, fraction)
        return fraction * seen.low, fraction * seen.high

    return ends


#: Every observer. Names are API; ``percentile:99.9`` chooses another share.
OBSERVERS: dict[str, Observer] = {
    row.name: row
    for row in (
        Observer("minmax", "the least and the greatest number seen", _extremes),
        Observer("moving-average", "the moving average of each batch's least and greatest number", _average),
        Observer("percentile", f"the range that {_PERCENT}% of the numbers lie in", _percentile(_PERCENT), True),
        Observer("entropy", "the range with the least KL divergence (TensorRT)", _least(_divergence), True),
        Observer("mse", "the range with the least squared error", _least(_squared), True),
    )
}


def find_observer(name: str) -> Observer | None:
    """The observer of that name; None for a name that is none. Raises ValueError for a share that is none."""
    base, _, percent = name.partition(":")
    found = OBSERVERS.get(spelled(base))
    if found is None or not percent:
        return found
    try:
        share = float(percent)
    except ValueError:
        share = math.nan
    if found.name != "percentile" or not 50 < share <= 100:
        raise ValueError(f"observer {name!r}: only percentile takes a share, between 50 and 100, as in percentile:99.9")
    return found._replace(name=name, range=_percentile(share))


def processes() -> int:
    """How many processes of ``torch.distributed`` calibrate together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def everywhere(holds: bool) -> bool:
    """Whether ``holds`` is true in every process."""
    if processes() == 1:
        return holds
    votes = torch.tensor([holds], dtype=torch.int32)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.all())


def _gathered(one: Tensor) -> list[Tensor]:
    """``one`` of each process, in their order."""
    if processes() == 1:
        return [one]
    found = [torch.empty_like(one) for _ in range(processes())]
    dist.all_gather(found, one)
    return found
