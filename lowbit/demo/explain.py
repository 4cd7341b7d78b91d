"""What a run of the demo holds in which precision, in bytes: what ``lowbit train --explain`` prints."""

from __future__ import annotations

import torch
from torch import nn

from lowbit.demo.experiment import Settings
from lowbit.demo.gpt import GPT
from lowbit.demo.loop import optimizer_of
from lowbit.demo.optimizers import state_bytes
from lowbit.models.ties import model_bytes, tensor_bytes
from lowbit.train import TrainLinear, prepare_
from lowbit.train.mixed import PRECISIONS

__all__ = ["held_bytes"]


def held_bytes(settings: Settings, precision: str) -> dict[str, int]:
    """Bytes of the parts that a step in ``precision`` holds beside activations.

    ``weights``; ``copies``: what products multiply in their place, in 16 bits or encoded; ``gradients``; ``states`` of
    the optimizer, by a first step of it.
    """
    config = settings.of(precision)
    model = GPT(settings.model, seed=config.seed)
    if config.recipe is not None:
        prepare_(model, config.recipe)
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer = optimizer_of(model, config)
    optimizer.step()
    return {
        "weights": model_bytes(model),
        "copies": sum(_copy_bytes(m, config.floats) for m in model.modules() if isinstance(m, nn.Linear)),
        "gradients": tensor_bytes(param.grad for param in model.parameters() if param.grad is not None),
        "states": state_bytes(optimizer),
    }


def _copy_bytes(layer: nn.Linear, floats: str) -> int:
    cast = layer.recipe.casts().get("output.b") if isinstance(layer, TrainLinear) else None
    if cast is not None:
        return cast.scheme.nbytes(tuple(layer.weight.shape))
    return layer.weight.numel() * PRECISIONS[floats].itemsize if floats in PRECISIONS else 0
