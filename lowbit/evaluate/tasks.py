"""What quality means for each kind of model: the table of tasks."""

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

#: Values of single items by the name of their metric.
Values = Mapping[str, Sequence[float]]


class Batch(NamedTuple):
    """What a model is called with, and what its outputs are held against (for language models: the next tokens).

    ``items`` counts windows, texts or images; ``units`` what speed counts: tokens, texts or images.
    """

    inputs: Any
    targets: Tensor | None
    items: int
    units: int


class Figure(NamedTuple):
    """One column of the table, an ``estimate`` of the items' values of the metric ``of`` and the baseline's; none where
    a result has no such metric. ``percent``: written as a percentage; ``loss``: how far from none lost, for the plot.
    """

    title: str
    of: str
    estimate: Callable[[Sequence[float], Sequence[float]], Estimate]
    percent: bool = False
    loss: Callable[[float], float] | None = None


class Task(NamedTuple):
    """``measure`` turns a batch, the model's outputs and those of the fp32 model into values of the batch's items.

    ``reference``: whether it needs the outputs of the fp32 model. ``figures`` are made of the values and of the
    baseline's (the model in the float format that is quantized from); the first with a ``loss`` is drawn.
    """

    items: str
    units: str
    reference: bool
    measure: Callable[[Batch, Tensor, Tensor | None], dict[str, list[float]]]
    figures: tuple[Figure, ...]


def _next_tokens(batch: Batch, outputs: Tensor, reference: Tensor | None) -> dict[str, list[float]]:
    assert batch.targets is not None
    return {"loss": window_losses(outputs, batch.targets)}


def _directions(batch: Batch, outputs: Tensor, reference: Tensor | None) -> dict[str, list[float]]:
    assert reference is not None
    return {"cosine": cosine(outputs, reference)}


def _classes(batch: Batch, outputs: Tensor, reference: Tensor | None) -> dict[str, list[float]]:
    """A photograph is one item: its crops ``[items * crops, classes]`` are averaged, because they are alike."""
    assert reference is not None
    made = {
        "top-1": same_top(outputs, reference), "top-5": same_top(outputs, reference, 5),
        "cosine": cosine(outputs, reference), "sqnr": sqnr(outputs, reference),
    }  # fmt: skip
    return {name: torch.tensor(values).view(batch.items, -1).mean(1).tolist() for name, values in made.items()}


def _mean(values: Sequence[float], baseline: Sequence[float]) -> Estimate:
    return mean(values)


_COSINE = Figure("cosine to fp32", "cosine", _mean, loss=lambda value: 1 - value)

#: Every kind of model. The names stand in result files.
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
