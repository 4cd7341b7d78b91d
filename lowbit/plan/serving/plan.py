"""GenerationPlan: the chosen settings of a generation, their predicted memory and loss, and the alternatives."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from lowbit._version import __version__
from lowbit.plan.base import BasePlan, plain_values
from lowbit.plan.bits import FLOAT
from lowbit.plan.serving.layers import arrange_
from lowbit.plan.serving.losses import BY
from lowbit.plan.serving.predict import ServingPrediction
from lowbit.plan.serving.run import GenerationRun
from lowbit.plan.serving.settings import CHOICES, PACKED, STORED, ServingSettings, cache_name, part_name
from lowbit.sizes import amount
from lowbit.tables import aligned

__all__ = ["GenerationPlan", "words"]


class GenerationPlan(BasePlan[ServingPrediction, ServingSettings]):
    """The result of ``lb.fit_generation``. ``apply_`` quantizes the model; ``print`` shows the choices.

    Attributes:
        settings: The chosen settings.
        peak_bytes: Predicted peak while ``context`` tokens of ``rows`` sequences are generated.
        plain: Prediction for the unchanged model.
        frontier: Predictions for which no other is both smaller and has less loss.
        layers: For each recipe the number of layers, the bytes of their weights and their loss.
        by: Source of the losses, a key of ``lowbit.plan.serving.losses.BY``; "" if nothing is quantized.
        context: Most tokens of a sequence, prompt included.
        rows: Most sequences at a time.
    """

    _task, _classes = "generate", (ServingPrediction, ServingSettings)

    def __init__(
        self,
        chosen: ServingPrediction,
        budget: int,
        plain: ServingPrediction,
        predictions: Sequence[ServingPrediction],
        layers: Mapping[str, tuple[int, int, float]],
        by: str,
        context: int,
        rows: int,
    ) -> None:
        super().__init__(chosen, budget, plain, predictions, lambda prediction: prediction.loss)
        self.layers, self.by, self.context, self.rows = dict(layers), by, context, rows

    @property
    def loss(self) -> float:
        """Predicted increase of the loss, see ``by``."""
        return self.chosen.loss

    # -- generation ----------------------------------------------------------------------------------------------
    def apply_(self, model: nn.Module) -> GenerationRun:
        """Quantize ``model`` in place as planned, and pack it if the plan says so.

        During the call, memory holds the original and the quantized weights. If that is too much, save the quantized
        model, and load it for generation.

        Args:
            model: The model of the plan.

        Returns:
            A GenerationRun, with ``generate(tokens, max_new_tokens)`` and ``model``.

        Raises:
            ValueError: If the model lacks layers of the plan (it does not change), and as ``lb.quantize_``.
        """
        missing = [name for name, _ in self._quantized() if name not in dict(model.named_modules())]
        if missing:
            raise ValueError(
                f"plan.apply_: the plan is for a model with the layer {missing[0]}, which {type(model).__name__} does "
                f"not have; make a plan for this model"
            )
        return GenerationRun(arrange_(model, self.settings), self.settings, self.context, self.rows)

    def _quantized(self) -> Iterator[tuple[str, str]]:
        """Return the quantized layers and their recipes."""
        return ((name, recipe) for name, recipe in self.settings.weights.items() if recipe != FLOAT)

    # -- texts ---------------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        chosen, rows = self.chosen, f" of {self.rows} sequences" if self.rows > 1 else ""
        lines = [
            f"budget {amount(self.budget)}: generation of up to {self.context} tokens{rows} needs "
            f"{amount(chosen.peak_bytes)} in {chosen.peak_event}, the unchanged model {amount(self.plain.peak_bytes)}",
            f"weights {amount(chosen.weights)}, full cache {amount(chosen.cache)}, temporaries "
            f"{amount(chosen.temporaries)}",
            f"quality: {self._quality()}",
        ]
        table = [("choice", "is", "memory", "loss", "which means")]
        for name, (count, size, loss) in sorted(
            self.layers.items(), key=lambda row: list(CHOICES["weights"]).index(row[0])
        ):
            layers = f"of {count} layer{'s' if count > 1 else ''}"
            table.append(("weights", name, amount(size), f"{loss:.3g}", f"{CHOICES['weights'][name]}, {layers}"))
        cache_loss = chosen.loss - sum(loss for _, _, loss in self.layers.values())
        cache, prompt = cache_name(chosen.settings.cache), part_name(chosen.settings.part)
        table.append(("cache", cache, amount(chosen.cache), f"{max(cache_loss, 0.0):.3g}", CHOICES["cache"][cache]))
        table.append(("prompt", prompt, "", "", CHOICES["prompt"][prompt]))
        layout = PACKED if chosen.settings.packed else STORED
        table.append(("layout", layout, "", "", CHOICES["layout"][layout]))
        return "\n".join([*lines, "", aligned(table, (2, 3))])

    def _quality(self) -> str:
        if not self.by:
            return "unchanged, because nothing is quantized"
        return BY[self.by].format(loss=self.loss, percent=math.expm1(min(self.loss, 100.0)))

    def table(self) -> str:
        """Return a table of the frontier: peaks and losses, smallest peak first."""
        return self._table("loss", self.frontier, lambda row: (f"{row.loss:.4g}", words(row.settings)))

    # -- files ---------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self._task, **super().as_dict(), "context": self.context, "rows": self.rows, "by": self.by,
            "frontier": [plain_values(row) for row in self.frontier if row is not self.chosen],
            "layers": {name: list(row) for name, row in self.layers.items()}, "lowbit": __version__,
        }  # fmt: skip

    @classmethod
    def _of(cls, data: dict[str, Any]) -> GenerationPlan:
        chosen, plain, *others = map(cls._read, (data["chosen"], data["plain"], *data["frontier"]))
        layers = {name: (row[0], row[1], row[2]) for name, row in data["layers"].items()}
        return cls(chosen, data["budget"], plain, others, layers, data["by"], data["context"], data["rows"])


def words(settings: ServingSettings) -> str:
    """Summarize settings: the recipes with their numbers of layers, the cache, the prompt and the layout."""
    counts = Counter(name for name in settings.weights.values() if name != FLOAT)
    parts = [f"{name} ({counts[name]})" for name in CHOICES["weights"] if name in counts]
    parts += [f"cache {settings.cache}"] if settings.cache is not None else []
    parts += [part_name(settings.part)] if settings.part is not None else []
    parts += [PACKED] if settings.packed else []
    return ", ".join(parts) or "unchanged"
