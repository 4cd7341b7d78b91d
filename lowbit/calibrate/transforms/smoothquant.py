"""SmoothQuant: moves half of the range of large activation columns to the weights.

Source: Xiao et al., arXiv 2211.10438, equation 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.calibrate.recording import Observed
from lowbit.calibrate.statistics import Statistics

__all__ = ["factors"]

#: The share of the range that moves to the weights.
_ALPHA = 0.5


def factors(layers: list[Observed], statistics: Statistics) -> Tensor:
    """``max|x_j|^a / max|w_j|^(1 - a)`` of each column; 1 if either is 0."""
    weights = torch.stack([layer.weight.float().abs().amax(0) for layer in layers]).amax(0)
    ratio = statistics.largest**_ALPHA / weights ** (1 - _ALPHA)
    return torch.where(ratio.isfinite() & (ratio > 0), ratio, 1.0)
