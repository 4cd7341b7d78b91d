"""SmoothQuant: half of what a column of activations is larger than others is given to the weights that it meets.

Source: Xiao et al., arXiv 2211.10438, equation 4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.calibrate.recording import Observed
from lowbit.calibrate.statistics import Statistics

__all__ = ["factors"]

#: How much of the difference goes to the weights.
_ALPHA = 0.5


def factors(layers: list[Observed], statistics: Statistics) -> Tensor:
    """``max|x_j|^a / max|w_j|^(1 - a)`` of each column; 1 where either is 0."""
    weights = torch.stack([layer.weight.float().abs().amax(0) for layer in layers]).amax(0)
    found = statistics.largest**_ALPHA / weights ** (1 - _ALPHA)
    return torch.where(found.isfinite() & (found > 0), found, 1.0)
