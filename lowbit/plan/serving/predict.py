"""What generation by a choice holds: few estimates of the model as it is give all, what is chosen is estimated whole.

What a forward holds beside the weights does not depend on their recipes, but for what ops take for themselves.
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
    """Bytes: the most that is held, at ``peak_event``, of which ``weights``, and a full ``cache``. ``loss``: see
    ``BY``."""

    settings: ServingSettings
    peak_bytes: int
    weights: int
    cache: int
    loss: float = 0.0
    peak_event: str = ""

    @property
    def temporaries(self) -> int:
        """What is held beside weights and a full cache."""
        return self.peak_bytes - self.weights - self.cache


@dataclass
class Predictor:
    """Predictions for a model and so many tokens of so many sequences at a time."""

    model: nn.Module
    decoder: Decoder
    context: int
    rows: int
    _known: dict[tuple[str | None, int | None], Generation] = field(default_factory=dict)

    def plain(self, cache: str | None, part: int | None) -> Generation:
        """With the weights as they are."""
        if (cache, part) not in self._known:
            self._known[cache, part] = self._estimated(ServingSettings(cache=cache, part=part))
        return self._known[cache, part]

    def whole(self, settings: ServingSettings, loss: float) -> ServingPrediction:
        """By an estimate of the model as it will be; it is packed where a layer gains by that."""
        found = self._estimated(settings)
        done = replace(settings, packed=found.packed)
        return ServingPrediction(done, found.peak_bytes, found.weights, found.cache_bytes, loss, str(found.peak_event))

    def _estimated(self, settings: ServingSettings) -> Generation:
        return estimate_generation(
            self.model, self.context, self.rows, self.decoder.forward,
            lambda model: self.decoder.cache(model, self.rows, settings.cache), part=settings.part,
            prepare=lambda model: arrange_(model, settings, Allocated()),
        )  # fmt: skip
