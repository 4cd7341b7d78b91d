"""The table of tasks: quality metrics for each kind of model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.evaluate.metrics import (
    Estimate,
    change_of_perplexity,
    cosine,
    mean,
    perplexity,
    same_top,
    sqnr,
    window_losses,
)

__all__ = ["TASKS", "Batch", "Figure", "Task", "Values"]

#: Values per item, by metric.
Values = Mapping[str, Sequence[float]]


class Batch(NamedTuple):
    """A batch of evaluation data."""

    inputs: Any
    targets: Tensor | None
    """Next tokens for language models; None for other models."""
    items: int
    """Number of windows, texts or images."""
    units: int
    """Number of tokens, texts or images, for speeds."""


class Figure(NamedTuple):
    """A column of the table."""

    title: str
    metric: str
    """Name of the values; a result without them has no figure."""
    estimate: Callable[[Sequence[float], Sequence[float]], Estimate]
    """Function of the values and the baseline's values."""
    percent: bool = False
    """Whether to print a percentage."""
    loss: Callable[[float], float] | None = None
    """The quality loss for the plot, 0 for no loss."""


class Task(NamedTuple):
    """A kind of evaluation."""

    items: str
    """Plural name of the items."""
    units: str
    """Plural name of the units."""
    reference: bool
    """Whether ``measure`` needs the outputs of the fp32 model."""
    measure: Callable[[Batch, Tensor, Tensor | None], dict[str, list[float]]]
    """Function of a batch, outputs and fp32 outputs that returns values per item by metric."""
    figures: tuple[Figure, ...]
    """Columns; the first with a ``loss`` is plotted."""


def _next_tokens(batch: Batch, outputs: Tensor, reference: Tensor | None) -> dict[str, list[float]]:
    assert batch.targets is not None
    return {"loss": window_losses(outputs, batch.targets)}


def _directions(batch: Batch, outputs: Tensor, reference: Tensor | None) -> dict[str, list[float]]:
    assert reference is not None
    return {"cosine": cosine(outputs, reference)}


def _classes(batch: Batch, outputs: Tensor, reference: Tensor | None) -> dict[str, list[float]]:
    """Means over the crops of a photograph, ``[items * crops, classes]``: the crops are not independent items."""
    assert reference is not None
    metrics = {
        "top-1": same_top(outputs, reference), "top-5": same_top(outputs, reference, 5),
        "cosine": cosine(outputs, reference), "sqnr": sqnr(outputs, reference),
    }  # fmt: skip
    return {name: torch.tensor(values).view(batch.items, -1).mean(1).tolist() for name, values in metrics.items()}


def _mean(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    return mean(values)


_COSINE = Figure("cosine to fp32", "cosine", _mean, loss=lambda value: 1 - value)

#: All tasks. Result files contain the names.
TASKS: dict[str, Task] = {
    "perplexity": Task(
        "windows", "tokens", False, _next_tokens,
        (
            Figure("perplexity", "loss", lambda values, baseline: perplexity(values)),
            Figure("change", "loss", change_of_perplexity, percent=True, loss=lambda value: value),
        ),
    ),
    "embeddings": Task("texts", "texts", True, _directions, (_COSINE,)),
    "logits": Task(
        "photographs", "images", True, _classes,
        (
            Figure("same top class as fp32", "top-1", _mean, percent=True),
            Figure("fp32's class in the top 5", "top-5", _mean, percent=True),
            _COSINE,
            Figure("SQNR, dB", "sqnr", _mean),
        ),
    ),
}  # fmt: skip
