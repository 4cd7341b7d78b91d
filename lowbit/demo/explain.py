"""Memory of a demo run by part: printed by ``lowbit train --explain``, and in the report."""

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

#: Head and explanation of a table of memory per run, in MiB; its cells are ``written``.
HEAD = ("run", "weights", "states", "step", "gradients", "copies", "total", "share")
SAYS = (
    "In MiB. Each row changes one thing of the row above it, or of the first row: precision, then FP8 compression of "
    "activations saved by norms and activation functions, then the optimizer. Weights and optimizer states are "
    "allocated all the time. step: peak of further allocations in a step, by torch's allocator. It includes gradients "
    "and copies of weights (quantized or in 16 bits). share: of the first row's total."
)


@dataclass(frozen=True)
class Held:
    """Bytes of a run."""

    config: TrainConfig
    weights: int
    """Parameters, with the training state of a recipe."""
    states: int
    """Optimizer states."""
    step: int
    """Peak of allocations in a step, without weights and states, by torch's allocator."""
    gradients: int
    """Gradients; part of ``step``."""
    copies: int
    """Quantized or 16-bit copies of weights for matmuls; part of ``step``."""

    @property
    def total(self) -> int:
        return self.weights + self.states + self.step

    def to_dict(self) -> dict[str, Any]:
        """The values as JSON."""
        names = {name: getattr(self.config, name) for name in ("precision", "compress_activations", "optimizer")}
        sizes = {row.name: getattr(self, row.name) for row in fields(self) if row.name != "config"}
        return {**names, **sizes, "total": self.total}


def held(shape: GPTConfig, config: TrainConfig) -> Held:
    """Measure the memory of a run before its tail, on a separate model with random tokens.

    It measures the second step, because the first one allocates the optimizer states.
    """
    model = GPT(shape, seed=config.seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself gives the warnings
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
    gc.collect()  # earlier models must not be freed during the measured step
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
    """The cells below ``HEAD``; all but the first are numbers."""
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
    """The first configuration, and single changes from it to each other one, so that each row shows one saving."""
    first, *rest = configs
    rows = [first]
    for target in rest:
        config = first
        for change in (
            {"precision": target.precision},
            {"compress_activations": target.compress_activations},
            {"optimizer": target.optimizer},
        ):
            changed = replace(config, **change)  # type: ignore[arg-type]
            if changed != config:
                rows.append(changed)
            config = changed
    return rows
