"""What a run of the demo holds in memory, part by part: printed by ``lowbit train --explain``, and in the report."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from lowbit.demo.config import TrainConfig
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.optimizers import state_bytes
from lowbit.demo.step import arrange_, loss_of, optimizer_of, update
from lowbit.memory.measure import allocated_peak
from lowbit.models.ties import model_bytes, tensor_bytes
from lowbit.train import LossScaler, TrainLinear
from lowbit.train.mixed import PRECISIONS

__all__ = ["HEAD", "SAYS", "Held", "held", "one_by_one", "written"]

#: The head of a table of what runs hold, in MiB, whose cells are ``written``; ``SAYS`` is what it means.
HEAD = ("run", "weights", "states", "step", "gradients", "copies", "in all", "share")
SAYS = (
    "In MiB. Each row changes one thing of the row above it, or of the first row: precision, then what norms and "
    "activation functions keep for backward (codes in FP8), then the optimizer. Weights and states of the optimizer "
    "are there all the time. A step allocates so much more at a time, by torch's allocator; gradients and copies of "
    "weights, encoded or in 16 bits, are part of it. The share is of the first row's bytes in all."
)


@dataclass(frozen=True)
class Held:
    """Bytes of a run by ``config``.

    ``weights`` (with the training state of a recipe) and ``states`` of the optimizer are there all the time. ``step``
    is the most that a step allocates beyond them at a time, by torch's allocator. Part of it are ``gradients``, and
    ``copies`` of weights: what products multiply in their place, in 16 bits or encoded.
    """

    config: TrainConfig
    weights: int
    states: int
    step: int
    gradients: int
    copies: int

    @property
    def total(self) -> int:
        return self.weights + self.states + self.step

    def to_dict(self) -> dict[str, Any]:
        """JSON data."""
        what = {name: getattr(self.config, name) for name in ("precision", "compress_activations", "optimizer")}
        sizes = {row.name: getattr(self, row.name) for row in fields(self) if row.name != "config"}
        return {**what, **sizes, "total": self.total}


def held(shape: GPTConfig, config: TrainConfig) -> Held:
    """What a run by ``config`` holds before its tail, measured on a model of its own with random tokens.

    So no bit of a run depends on it. The step measured is the second, since the first makes the optimizer's states.
    """
    model = GPT(shape, seed=config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself says what is slow here
        arrange_(model, config)
    optimizer, scaler = optimizer_of(model, config), LossScaler(enabled=config.floats == "fp16")
    generator = torch.Generator().manual_seed(config.seed)
    tokens_BT = torch.randint(shape.vocab, (config.batch, config.context + 1), generator=generator)

    def backward() -> None:
        torch.autograd.backward(scaler.scale(loss_of(model, tokens_BT[:, :-1], tokens_BT[:, 1:])))

    def step() -> None:
        backward()
        update(model, optimizer, scaler, config.clip)

    step()
    gc.collect()  # what earlier models leave, or its end would fall into the step
    peak = allocated_peak(step)
    backward()
    return Held(
        config,
        weights=model_bytes(model),
        states=state_bytes(optimizer),
        step=peak,
        gradients=tensor_bytes(param.grad for param in model.parameters() if param.grad is not None),
        copies=sum(_copy_bytes(m, config.floats) for m in model.modules() if isinstance(m, nn.Linear)),
    )


def written(rows: Sequence[Held]) -> list[tuple[str, ...]]:
    """The cells below ``HEAD``, of which the first is a word."""
    return [
        (
            ", ".join((row.config.precision, *(("codes",) if row.config.compress_activations else ()),
                       row.config.optimizer)),
            *(f"{size / 2**20:,.1f}"
              for size in (row.weights, row.states, row.step, row.gradients, row.copies, row.total)),
            f"{row.total / rows[0].total:.0%}",
        )
        for row in rows
    ]  # fmt: skip


def _copy_bytes(layer: nn.Linear, floats: str) -> int:
    cast = layer.recipe.casts().get("output.b") if isinstance(layer, TrainLinear) else None
    if cast is not None:
        return cast.scheme.nbytes(tuple(layer.weight.shape))
    return layer.weight.numel() * PRECISIONS[floats].itemsize if floats in PRECISIONS else 0


def one_by_one(configs: Iterable[TrainConfig]) -> list[TrainConfig]:
    """The first configuration, and what leads from it to each of the others: precision changes, then what is kept of
    activations, then the optimizer. So two rows in succession show what one change saves.
    """
    first, *others = configs
    found = [first]
    for other in others:
        now = first
        for change in (
            {"precision": other.precision},
            {"compress_activations": other.compress_activations},
            {"optimizer": other.optimizer},
        ):
            changed = replace(now, **change)  # type: ignore[arg-type]
            if changed != now:
                found.append(changed)
            now = changed
    return found
