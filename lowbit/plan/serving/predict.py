"""Predicted memory of generation, from a few estimates of the unquantized model and one of the chosen settings.

The memory of a forward besides the weights does not depend on their recipes, except for scratch memory of the ops.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import nn

from lowbit.convert.maker import Allocated
from lowbit.memory.inference import Generation, estimate_generation
from lowbit.plan.serving.decoders import Decoder
from lowbit.plan.serving.layers import arrange_
from lowbit.plan.serving.settings import ServingSettings

__all__ = ["Predictor", "ServingPrediction"]


class ServingPrediction(NamedTuple):
    """The predicted peak, in bytes, with the weights and the full cache in it, and the loss (see ``BY``)."""

    settings: ServingSettings
    peak_bytes: int
    weights: int
    cache: int
    loss: float = 0.0
    peak_event: str = ""

    @property
    def temporaries(self) -> int:
        """Bytes besides the weights and a full cache."""
        return self.peak_bytes - self.weights - self.cache


@dataclass
class Predictor:
    """Predictions for a model, with a number of tokens (``context``) and of sequences (``rows``)."""

    model: nn.Module
    decoder: Decoder
    context: int
    rows: int
    _known: dict[tuple[str | None, int | None], Generation] = field(default_factory=dict)

    def plain(self, cache: str | None, part: int | None) -> Generation:
        """Return the estimate with unquantized weights."""
        if (cache, part) not in self._known:
            self._known[cache, part] = self._estimated(ServingSettings(cache=cache, part=part))
        return self._known[cache, part]

    def whole(self, settings: ServingSettings, loss: float) -> ServingPrediction:
        """Return the prediction from an estimate of the quantized model, packed only if a layer gains from it."""
        usage = self._estimated(settings)
        settings = replace(settings, packed=usage.packed)
        return ServingPrediction(
            settings, usage.peak_bytes, usage.weights, usage.cache_bytes, loss, str(usage.peak_event)
        )

    def _estimated(self, settings: ServingSettings) -> Generation:
        return estimate_generation(
            self.model, self.context, self.rows, self.decoder.forward,
            lambda model: self.decoder.cache(model, self.rows, settings.cache), part=settings.part,
            prepare=lambda model: arrange_(model, settings, Allocated()),
        )  # fmt: skip
