"""The table of observers: which static range is made of the numbers that a layer is given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lowbit.functional import fake_quantize, quantize
from lowbit.name_tables import spelled
from lowbit.observers.ranges import BINS, Ranges
from lowbit.scaling import scheme
from lowbit.tensor.quantized import Scales

__all__ = ["OBSERVERS", "Observer", "find_observer"]

#: The fractions of the whole range that are tried, and the share of numbers that a percentile keeps.
_FRACTIONS, _PERCENT = tuple(k / 128 for k in range(8, 129)), 99.99


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
        step = 2.0**seen.exponent / (BINS / 2)
        first = (share <= cut).sum(0)  # bins that lie wholly below
        last = (share < 1 - cut).sum(0)
        low = (first - BINS / 2) * step
        high = (last + 1 - BINS / 2) * step
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
        by_column = scheme(f"{seen.scheme.format.name}:col" + (":affine" if seen.scheme.affine else ""))
        centers = seen.centers.to(seen.low.device)[:, None].expand(-1, len(seen.low)).contiguous()
        best = torch.full_like(seen.low, math.inf, dtype=torch.float64)
        fraction = torch.ones_like(seen.low)
        for share in reversed(_FRACTIONS):
            low, high = share * seen.low, share * seen.high
            scales = Scales.of(quantize(torch.stack([low, high]), by_column))
            decoded = fake_quantize(centers, by_column, *scales)
            reach = low if seen.scheme.affine else torch.minimum(low, -high)
            inside = (centers >= reach) & (centers <= (high if seen.scheme.affine else -reach))
            lost = loss(centers.double(), seen.counts, decoded.double(), inside)
            less = lost < best
            best, fraction = torch.where(less, lost, best), torch.where(less, share, fraction)
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
