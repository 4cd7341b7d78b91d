"""Quality of a model in numbers: values of single items (windows, texts, images), and means with standard errors.

Sums are in float64, whatever the model computes in.
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

#: Rows of logits whose softmax is taken at once: a vocabulary of 50000 in float64 needs 26 MB for 64 rows.
_ROWS = 64


class Estimate(NamedTuple):
    """A mean and its standard error (None of a single item)."""

    value: float
    error: float | None


def window_losses(logits: Tensor, targets: Tensor) -> list[float]:
    """The mean negative log-likelihood, in nats a token, of each window.

    ``logits`` [B, T, V] floats, ``targets`` [B, T] integers: the token that follows each position.
    """
    losses = []
    for rows, expected in zip(logits, targets, strict=True):
        total = 0.0
        for piece, wanted in zip(rows.split(_ROWS), expected.split(_ROWS), strict=True):
            likely = piece.double().log_softmax(-1).gather(-1, wanted[:, None])
            total -= float(likely.sum())
        losses.append(total / len(expected))
    return losses


def cosine(outputs: Tensor, reference: Tensor) -> list[float]:
    """The cosine of the angle between each row of ``outputs`` [B, D] and its row of ``reference`` [B, D].

    Two rows of zeros are alike (1); a row of zeros and another are not (0); NaN gives NaN.
    """
    a, b = outputs.double(), reference.double()
    lengths = a.norm(dim=-1) * b.norm(dim=-1)
    cosines = (a * b).sum(-1) / lengths
    equal = (a == b).all(-1).double()
    return torch.where(lengths == 0, equal, cosines).tolist()


def sqnr(outputs: Tensor, reference: Tensor) -> list[float]:
    """10 log10 of the energy of each row of ``reference`` [B, D] over that of what ``outputs`` [B, D] differ by, in dB;
    at most 200, which stands for none.
    """
    a, b = outputs.double(), reference.double()
    ratio = b.square().sum(-1) / (a - b).square().sum(-1)
    return (10 * ratio.log10()).clamp(max=200.0).tolist()


def same_top(outputs: Tensor, reference: Tensor, count: int = 1) -> list[float]:
    """1.0 for each row of ``reference`` [B, D] whose largest element is where one of the ``count`` largest of that row
    of ``outputs`` [B, D] is, else 0.0.

    A row with NaN agrees with none.
    """
    classes = outputs.topk(min(count, outputs.shape[-1]), -1).indices
    agree = (classes == reference.argmax(-1, keepdim=True)).any(-1) & ~outputs.isnan().any(-1)
    return agree.double().tolist()


def mean(values: Sequence[float]) -> Estimate:
    """The mean of ``values`` and its standard error. Raises: ValueError for none."""
    if not values:
        raise ValueError("a mean needs at least one value")
    average = math.fsum(values) / len(values)
    if len(values) == 1:
        return Estimate(average, None)
    variance = math.fsum((value - average) ** 2 for value in values) / (len(values) - 1)
    return Estimate(average, math.sqrt(variance / len(values)))


def perplexity(losses: Sequence[float]) -> Estimate:
    """Perplexity: the exponential of the mean of ``losses`` (nats a token, of windows of one length)."""
    return _exponential(mean(losses), 0.0)


def change_of_perplexity(losses: Sequence[float], baseline: Sequence[float]) -> Estimate:
    """By how much the perplexity is above that of the baseline on the same windows, as a fraction.

    The error is that of the paired differences: windows differ much in difficulty, and both models meet the same ones.
    Raises: ValueError where the numbers of windows differ.
    """
    if len(losses) != len(baseline):
        raise ValueError(f"{len(losses)} windows cannot be paired with {len(baseline)} of the baseline")
    return _exponential(mean([a - b for a, b in zip(losses, baseline, strict=True)]), 1.0)


def _exponential(of: Estimate, minus: float) -> Estimate:
    """The exponential of a mean, less ``minus``; its error to first order. Inf where the exponential overflows."""
    try:
        value = math.exp(of.value)
    except OverflowError:
        value = math.inf
    return Estimate(value - minus, None if of.error is None else value * of.error)
