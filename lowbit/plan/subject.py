"""Subject: a model with the batch and the loss that it is trained on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.memory.devices import Device

__all__ = ["Loss", "Subject"]

#: A loss of the model's output and the batch; None: ``lb.memory.usual_loss``.
Loss = Callable[[Any, Any], Tensor] | None


@dataclass(frozen=True, eq=False)
class Subject:
    """A model with the batch and the loss that it is trained on."""

    model: nn.Module
    batch: Any
    loss: Loss = None
    adapters: int | str | None = None
    """Adapters that a plan adds, as in ``TrainingSettings``."""
    target: Device | None = None
    """The device to train on, if it is not the model's."""

    @property
    def device(self) -> torch.device:
        """The device of the training: that of the first parameter, and the CPU for a model without parameters."""
        if self.target is not None:
            return torch.device("cuda")
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))
