"""Training by a plan."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from lowbit.memory import micro_batches, usual_loss
from lowbit.models.batches import call
from lowbit.plan.settings import Settings, arrange_, elsewhere

__all__ = ["Run", "accumulate"]


def accumulate(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor]) -> Tensor:
    """Forward and backward; returns the loss. The answer of the model goes as soon as the loss has been computed."""
    value = loss(call(model, batch), batch)
    value.backward()  # type: ignore[no-untyped-call]
    return value.detach()


class Run:
    """``model`` and ``optimizer`` of a plan, and ``step``, which takes one step on a batch."""

    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        loss: Callable[[Any, Any], Tensor] | None,
        directory: str | Path | None,
        options: dict[str, Any],
    ) -> None:
        self.model, self.settings = model, settings
        self._loss = loss or usual_loss
        self._directory = str(directory or tempfile.gettempdir())
        self.optimizer = arrange_(model, settings, self._directory, **options)

    def step(self, batch: Any) -> float:
        """One step of training on a batch, in as many parts as planned; returns its mean loss before the step.

        Parts are weighed by their rows. Raises as ``lb.memory.micro_batches`` for a batch that cannot be split.
        """
        total = 0.0
        with elsewhere(self.settings, self._directory):
            for part, weight in micro_batches(batch, self.settings.micro):
                total += accumulate(self.model, part, lambda *given, weight=weight: self._loss(*given) * weight).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total
