"""The table of observers: how a static range is computed from the statistics of a layer's inputs."""

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

#: The fractions of the full range that are tried, and the default percentile.
_FRACTIONS, _PERCENT = tuple(k / 128 for k in range(8, 129)), 99.99


class Observer(NamedTuple):
    """One way to compute a static range.

    Attributes:
        name: name of the observer.
        about: description for tables.
        range: computes the lower and the upper ends from ``Ranges``.
        histogram: whether it needs a histogram.
    """

    name: str
    about: str
    range: Callable[[Ranges], tuple[Tensor, Tensor]]
    histogram: bool = False


def _extremes(ranges: Ranges) -> tuple[Tensor, Tensor]:
    return ranges.low, ranges.high


def _average(ranges: Ranges) -> tuple[Tensor, Tensor]:
    assert ranges.average is not None
    return ranges.average[0], ranges.average[1]


def _percentile(percent: float) -> Callable[[Ranges], tuple[Tensor, Tensor]]:
    def ends(ranges: Ranges) -> tuple[Tensor, Tensor]:
        assert ranges.counts is not None
        share = ranges.counts.cumsum(0) / ranges.counts.sum(0)
        cut = (1 - percent / 100) / 2
        step = 2.0**ranges.exponent / (BINS / 2)
        first = (share <= cut).sum(0)  # number of bins entirely below the range
        last = (share < 1 - cut).sum(0)
        low = (first - BINS / 2) * step
        high = (last + 1 - BINS / 2) * step
        return torch.maximum(low.float(), ranges.low), torch.minimum(high.float(), ranges.high)

    return ends


def _squared(centers: Tensor, counts: Tensor, decoded: Tensor, inside: Tensor) -> Tensor:
    return ((centers - decoded).square() * counts).sum(0)


def _divergence(centers: Tensor, counts: Tensor, decoded: Tensor, inside: Tensor) -> Tensor:
    """KL divergence between the clipped values and the values spread evenly over the bins of each code.

    Zeros have an exact code in every range, so they count no more than the neighbouring bins. Source: the calibration
    of TensorRT, S. Migacz, GTC 2017, and of pytorch-quantization, which leaves out ReLU's zeros.
    """
    zero = len(counts) // 2
    counts = counts.clone()
    counts[zero] = torch.minimum(counts[zero], torch.maximum(counts[zero - 1], counts[zero + 1]))
    clipped = counts * inside
    bins = torch.arange(len(counts), device=counts.device)[:, None].expand_as(counts)
    last = torch.where(inside, bins, -1).amax(0, keepdim=True).clamp(min=0)
    first = torch.where(inside, bins, len(counts)).amin(0, keepdim=True).clamp(max=len(counts) - 1)
    p = clipped.clone()
    p.scatter_add_(0, last, (counts * (bins > last)).sum(0, keepdim=True))
    p.scatter_add_(0, first, (counts * (bins < first)).sum(0, keepdim=True))
    code = torch.cat([torch.zeros_like(bins[:1]), (decoded[1:] != decoded[:-1]).long()]).cumsum(0)
    mass = torch.zeros_like(clipped).scatter_add_(0, code, clipped).gather(0, code)
    used = torch.zeros_like(clipped).scatter_add_(0, code, (clipped > 0).double()).gather(0, code)
    q = torch.where(clipped > 0, mass / used.clamp(min=1), 0.0)
    p, q = p / p.sum(0), (q / q.sum(0).clamp(min=1)).clamp(min=1e-12)
    return torch.where(p > 0, p * (p.clamp(min=1e-300) / q).log(), 0.0).sum(0)


def _least(loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Callable[[Ranges], tuple[Tensor, Tensor]]:
    """The fraction of the full range with the smallest quantization loss."""

    def ends(ranges: Ranges) -> tuple[Tensor, Tensor]:
        assert ranges.counts is not None
        by_column = scheme(f"{ranges.scheme.format.name}:col" + (":affine" if ranges.scheme.affine else ""))
        centers = ranges.centers.to(ranges.low.device)[:, None].expand(-1, len(ranges.low)).contiguous()
        best = torch.full_like(ranges.low, math.inf, dtype=torch.float64)
        fraction = torch.ones_like(ranges.low)
        for share in reversed(_FRACTIONS):
            low, high = share * ranges.low, share * ranges.high
            scales = Scales.of(quantize(torch.stack([low, high]), by_column))
            decoded = fake_quantize(centers, by_column, *scales)
            reach = low if ranges.scheme.affine else torch.minimum(low, -high)
            inside = (centers >= reach) & (centers <= (high if ranges.scheme.affine else -reach))
            error = loss(centers.double(), ranges.counts, decoded.double(), inside)
            less = error < best
            best, fraction = torch.where(less, error, best), torch.where(less, share, fraction)
        return fraction * ranges.low, fraction * ranges.high

    return ends


#: All observers by name. Names are API; ``percentile:99.9`` selects another percentile.
OBSERVERS: dict[str, Observer] = {
    row.name: row
    for row in (
        Observer("minmax", "the smallest and the largest value", _extremes),
        Observer("moving-average", "the moving average of each batch's smallest and largest value", _average),
        Observer("percentile", f"the range with {_PERCENT}% of the values", _percentile(_PERCENT), True),
        Observer("entropy", "the range with the least KL divergence (TensorRT)", _least(_divergence), True),
        Observer("mse", "the range with the least squared error", _least(_squared), True),
    )
}


def find_observer(name: str) -> Observer | None:
    """Return the observer of that name, or None if there is none.

    Raises:
        ValueError: an invalid percentile.
    """
    base, _, percent = name.partition(":")
    observer = OBSERVERS.get(spelled(base))
    if observer is None or not percent:
        return observer
    try:
        share = float(percent)
    except ValueError:
        share = math.nan
    if observer.name != "percentile" or not 50 < share <= 100:
        raise ValueError(f"observer {name!r}: only percentile takes a share, between 50 and 100, as in percentile:99.9")
    return observer._replace(name=name, range=_percentile(share))
