"""The parts of a training step that need no run: the configuration's optimizer, the model arranged as it says, the
loss, and the update that follows backward.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbit.checkpointing.apply import checkpoint_
from lowbit.convert import Report
from lowbit.demo.config import TrainConfig
from lowbit.demo.gpt import GPT
from lowbit.demo.optimizers import find
from lowbit.train import LossScaler, compress_activations_, mixed_, prepare_

__all__ = ["arrange_", "evaluate", "loss_of", "optimizer_of", "update"]


def optimizer_of(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """The optimizer that ``config`` names. Vectors do not decay, and Muon takes the matrices that are no tables."""
    tables = [p for name, p in model.named_parameters() if name in ("embed.weight", "lm_head.weight")]
    matrices = [p for p in model.parameters() if p.ndim > 1 and all(p is not table for table in tables)]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    named = find(config.optimizer)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay * named.decay},
        {"params": tables, "weight_decay": config.weight_decay * named.decay, "muon": False},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return named.make([g for g in groups if g["params"]], lr=config.lr * named.lr)


def arrange_(model: nn.Module, config: TrainConfig) -> Report | None:
    """Make ``model`` compute, in place, as ``config`` says: by its recipe, with what backward keeps, in its floats.

    Returns the report of ``prepare_`` where there is a recipe.
    """
    prepared = None if config.recipe is None else prepare_(model, config.recipe)
    if config.checkpointing:
        checkpoint_(model, model.blocks if isinstance(model, GPT) else "block")
    if config.floats != "fp32":
        mixed_(model, config.floats)
    if config.compress_activations:  # the last, because a tail undoes it
        compress_activations_(model)
    return prepared


def loss_of(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats a token."""
    return F.cross_entropy(model(inputs_BT).flatten(0, 1).float(), targets_BT.flatten())


def update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, clip: float) -> None:
    """What follows backward: gradients without their scale, clipped; the optimizer's step; no gradients."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int = 16) -> float:
    """Mean loss in nats a token over ``windows`` [n, T + 1]."""
    total = 0.0
    for part in torch.split(windows, batch):
        total += loss_of(model, part[:, :-1], part[:, 1:]).item() * len(part)
    return total / len(windows)
