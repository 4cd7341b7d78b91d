"""AWQ: scales columns by the power of their mean activation with the least output error.

Source: Lin et al., arXiv 2306.00978. The output error is computed from E[x x^T], so no inputs are stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbit.calibrate.recording import Observed
from lowbit.calibrate.statistics import Statistics
from lowbit.functional import fake_quantize

__all__ = ["factors"]

#: Steps of the power from 0 to 1.
_STEPS = 20


def factors(layers: list[Observed], statistics: Statistics) -> Tensor:
    """``mean|x_j|^r``, with the ``r`` of the least squared output error."""
    magnitude = statistics.magnitude
    magnitude = torch.where(magnitude > 0, magnitude, magnitude.max())
    best, least = torch.ones_like(magnitude), None
    for step in range(_STEPS + 1):
        scale = magnitude ** (step / _STEPS)
        scale = scale / (scale.max() * scale.min()).sqrt()
        if not bool(scale.isfinite().all()):
            continue
        loss = sum(_loss(layer, scale, statistics.gram) for layer in layers)
        if least is None or loss < least:
            best, least = scale, loss
    return best


def _loss(layer: Observed, scale: Tensor, gram: Tensor) -> float:
    weight = layer.weight.float()
    rounded = layer.rotated(fake_quantize(layer.rotated(weight * scale), layer.recipe.weight))
    error = rounded / scale - weight
    return float(((error @ gram) * error).sum(dtype=torch.float64))
