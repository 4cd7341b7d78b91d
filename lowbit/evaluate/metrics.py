"""Quality metrics: values per item (window, text or image), and means with standard errors.

Sums are in float64 for every dtype of the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Estimate",
    "change_of_perplexity",
    "cosine",
    "mean",
    "perplexity",
    "same_top",
    "sqnr",
    "window_losses",
]

#: Rows of logits per softmax: 64 rows of a vocabulary of 50,000 need 26 MB in float64.
_ROWS = 64


class Estimate(NamedTuple):
    """A mean and its standard error (None for a single item)."""

    value: float
    error: float | None


def window_losses(logits: Tensor, targets: Tensor) -> list[float]:
    """The mean negative log-likelihood of each window, in nats per token.

    Args:
        logits: Floats [B, T, V].
        targets: The token after each position, integers [B, T].
    """
    losses = []
    for window_TV, targets_T in zip(logits, targets, strict=True):
        total = 0.0
        for rows, tokens in zip(window_TV.split(_ROWS), targets_T.split(_ROWS), strict=True):
            likelihoods = rows.double().log_softmax(-1).gather(-1, tokens[:, None])
            total -= float(likelihoods.sum())
        losses.append(total / len(targets_T))
    return losses


def cosine(outputs: Tensor, reference: Tensor) -> list[float]:
    """The cosine similarity of each row of ``outputs`` [B, D] and ``reference`` [B, D].

    It is 1 for two rows of zeros, 0 for one row of zeros, and NaN for rows with NaN.
    """
    a, b = outputs.double(), reference.double()
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    cosines = (a * b).sum(-1) / lengths
    equal = (a == b).all(-1).double()
    return torch.where(lengths == 0, equal, cosines).tolist()


def sqnr(outputs: Tensor, reference: Tensor) -> list[float]:
    """The signal-to-quantization-noise ratio of each row of ``outputs`` [B, D] against ``reference`` [B, D], in dB.

    It is at most 200, also for equal rows.
    """
    a, b = outputs.double(), reference.double()
    ratio = b.square().sum(-1) / (a - b).square().sum(-1)
    return (10 * ratio.log10()).clamp(max=200.0).tolist()


def same_top(outputs: Tensor, reference: Tensor, count: int = 1) -> list[float]:
    """1.0 for rows whose top class in ``reference`` [B, D] is in the top ``count`` of ``outputs`` [B, D], else 0.0.

    Rows of ``outputs`` with NaN are 0.0.
    """
    classes = outputs.topk(min(count, outputs.shape[-1]), -1).indices
    agree = (classes == reference.argmax(-1, keepdim=True)).any(-1) & ~outputs.isnan().any(-1)
    return agree.double().tolist()


def mean(values: Sequence[float]) -> Estimate:
    """The mean of ``values`` and its standard error. Raises ValueError without values."""
    if not values:
        raise ValueError("a mean needs at least one value")
    average = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(average, None)
    variance = math.fsum((value - average) ** 2 for value in values) / (len(values) - 1)
    return Estimate(average, math.sqrt(variance / len(values)))


def perplexity(losses: Sequence[float]) -> Estimate:
    """The exponential of the mean of ``losses``, in nats per token, from windows of equal length."""
    return _exponential(mean(losses), 0.0)


def change_of_perplexity(losses: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """The relative increase of the perplexity over the baseline, on the same windows.

    The standard error is of paired differences, because windows differ much in difficulty.

    Raises:
        ValueError: The numbers of windows differ.
    """
    if len(losses) != len(baseline):
        raise ValueError(f"{len(losses)} windows cannot be paired with {len(baseline)} of the baseline")
    return _exponential(mean([a - b for a, b in zip(losses, baseline, strict=True)]), 1.0)


def _exponential(estimate: Estimate, minus: float) -> Estimate:
    """exp(mean) - ``minus``, with its error to first order; Inf on overflow."""
    try:
        value = math.exp(estimate.value)
    except OverflowError:
        value = math.inf
    return Estimate(value - minus, None if estimate.error is None else value * estimate.error)
