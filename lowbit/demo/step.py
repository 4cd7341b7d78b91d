"""Parts of a training step: model preparation, optimizer, loss, update and evaluation."""

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
    """The optimizer of ``config``: vectors have no weight decay; Muon, GaLore and APOLLO skip embedding and head."""
    tables = [p for name, p in model.named_parameters() if name in ("embed.weight", "lm_head.weight")]
    matrices = [p for p in model.parameters() if p.ndim > 1 and all(p is not table for table in tables)]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    named = find(config.optimizer)
    groups = [
        {"params": matrices, "weight_decay": config.weight_decay * named.decay},
        {"params": tables, "weight_decay": config.weight_decay * named.decay, "muon": False, "rank": None},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return named.make([g for g in groups if g["params"]], lr=config.lr * named.lr)


def arrange_(model: nn.Module, config: TrainConfig) -> Report | None:
    """Apply recipe, checkpointing, mixed precision and activation compression in place.

    Returns:
        The report of ``prepare_``, or None without a recipe.
    """
    prepared = None if config.recipe is None else prepare_(model, config.recipe)
    if config.checkpointing:
        checkpoint_(model, model.blocks if isinstance(model, GPT) else "block")
    if config.floats != "fp32":
        mixed_(model, config.floats)
    if config.compress_activations:  # last, because the tail undoes it
        compress_activations_(model)
    return prepared


def loss_of(model: nn.Module, inputs_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross-entropy in nats per token."""
    return F.cross_entropy(model(inputs_BT).flatten(0, 1).float(), targets_BT.flatten())


def update(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: LossScaler, clip: float) -> None:
    """After backward: unscale and clip gradients, step, and clear the gradients."""
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@torch.no_grad()
def evaluate(model: nn.Module, windows: Tensor, batch: int = 16) -> float:
    """Mean loss in nats per token over ``windows`` [n, T + 1]."""
    total = 0.0
    for part in torch.split(windows, batch):
        total += loss_of(model, part[:, :-1], part[:, 1:]).item() * len(part)
    return total / len(windows)
