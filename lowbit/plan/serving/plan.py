"""A plan for generation: what is chosen, what it holds, and what else was to be had."""

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
    """See ``lb.fit_generation``. ``settings``: what is chosen. ``peak_bytes``: the most that is held
    while ``context`` tokens of ``rows`` sequences are generated, predicted. ``loss``: predicted too; ``by`` says of
    what, as a key of ``BY`` in ``losses``, and is empty where nothing is lost. ``plain``: the prediction of the model
    as it is. ``frontier``: those that nothing is both smaller and loses less than. ``layers``: by recipe the number of
    layers, the bytes of their weights and their loss.
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
        super().__init__(chosen, budget, plain, predictions, lambda one: one.loss)
        self.layers, self.by, self.context, self.rows = dict(layers), by, context, rows

    @property
    def loss(self) -> float:
        return self.chosen.loss

    # -- generation ----------------------------------------------------------------------------------------------
    def apply_(self, model: nn.Module) -> GenerationRun:
        """Quantize ``model`` in place as planned, and pack it where the plan says so; returns its ``GenerationRun``,
        with ``generate(tokens, max_new_tokens)`` and ``model``.

        Meanwhile plain and quantized weights are both held: where that is too much, save the model, and load it for
        generation. Raises ValueError for a model without the layers of the plan, which stays as it is; and as
        ``lb.quantize_``.
        """
        missing = [name for name, _ in self._quantized() if name not in dict(model.named_modules())]
        if missing:
            raise ValueError(
                f"plan.apply_: the plan is of a model with the layer {missing[0]}, and {type(model).__name__} has "
                f"none; make a plan for this model"
            )
        return GenerationRun(arrange_(model, self.settings), self.settings, self.context, self.rows)

    def _quantized(self) -> Iterator[tuple[str, str]]:
        """The layers with a recipe, by name."""
        return ((name, one) for name, one in self.settings.weights.items() if one != FLOAT)

    # -- for people ----------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        one, rows = self.chosen, f" of {self.rows} sequences" if self.rows > 1 else ""
        lines = [
            f"budget {amount(self.budget)}: generation within {self.context} tokens{rows} holds "
            f"{amount(one.peak_bytes)} in {one.peak_event}, of the model as it is {amount(self.plain.peak_bytes)}",
            f"weights {amount(one.weights)}, a full cache {amount(one.cache)}, the rest for a time "
            f"{amount(one.temporaries)}",
            f"quality: {self._quality()}",
        ]
        table = [("choice", "is", "holds", "loss", "which means")]
        for name, (count, size, loss) in sorted(
            self.layers.items(), key=lambda row: list(CHOICES["weights"]).index(row[0])
        ):
            layers = f"of {count} layer{'s' if count > 1 else ''}"
            table.append(("weights", name, amount(size), f"{loss:.3g}", f"{CHOICES['weights'][name]}, {layers}"))
        lost = one.loss - sum(loss for _, _, loss in self.layers.values())
        cache, prompt = cache_name(one.settings.cache), part_name(one.settings.part)
        table.append(("cache", cache, amount(one.cache), f"{max(lost, 0.0):.3g}", CHOICES["cache"][cache]))
        table.append(("prompt", prompt, "", "", CHOICES["prompt"][prompt]))
        layout = PACKED if one.settings.packed else STORED
        table.append(("layout", layout, "", "", CHOICES["layout"][layout]))
        return "\n".join([*lines, "", aligned(table, (2, 3))])

    def _quality(self) -> str:
        if not self.by:
            return "nothing is lost, everything stays as it is"
        return BY[self.by].format(loss=self.loss, percent=math.expm1(min(self.loss, 100.0)))

    def table(self) -> str:
        """The frontier: peaks and losses, smallest first."""
        return self._table("loss", self.frontier, lambda one: (f"{one.loss:.4g}", words(one.settings)))

    # -- files ---------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        return {
            "task": self._task, **super().as_dict(), "context": self.context, "rows": self.rows, "by": self.by,
            "frontier": [plain_values(one) for one in self.frontier if one is not self.chosen],
            "layers": {name: list(row) for name, row in self.layers.items()}, "lowbit": __version__,
        }  # fmt: skip

    @classmethod
    def _of(cls, data: dict[str, Any]) -> GenerationPlan:
        chosen, plain, *others = map(cls._read, (data["chosen"], data["plain"], *data["frontier"]))
        layers = {name: (row[0], row[1], row[2]) for name, row in data["layers"].items()}
        return cls(chosen, data["budget"], plain, others, layers, data["by"], data["context"], data["rows"])


def words(settings: ServingSettings) -> str:
    """The settings in few words: each recipe with its number of layers, the cache and the prompt."""
    counts = Counter(name for name in settings.weights.values() if name != FLOAT)
    found = [f"{name} ({counts[name]})" for name in CHOICES["weights"] if name in counts]
    found += [f"cache {settings.cache}"] if settings.cache is not None else []
    found += [part_name(settings.part)] if settings.part is not None else []
    found += [PACKED] if settings.packed else []
    return ", ".join(found) or "as it is"
