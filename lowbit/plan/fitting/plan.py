"""A plan: how a model is trained within a budget, what that takes, and what else was to be had."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit._version import __version__
from lowbit.files import read_json, write_json
from lowbit.machine import cpu_name
from lowbit.plan.fitting.adapt import alike
from lowbit.plan.fitting.choices import PARTS, described, words
from lowbit.plan.fitting.plot import plot
from lowbit.plan.fitting.predict import Prediction
from lowbit.plan.fitting.run import Run
from lowbit.plan.frontier import undominated
from lowbit.plan.settings import Settings
from lowbit.sizes import amount
from lowbit.tables import aligned

__all__ = ["Plan"]


class Plan:
    """See ``lb.fit``. ``settings``: what is turned on. ``peak_bytes`` and ``seconds``: of a step, predicted.
    ``plain``: the prediction of plain training. ``frontier``: those that nothing is both smaller and faster than.
    ``beside``: by dimension the prediction with the plain choice in its place.
    """

    def __init__(
        self,
        chosen: Prediction,
        budget: int,
        plain: Prediction,
        predictions: Sequence[Prediction],
        loss: Callable[[Any, Any], Tensor] | None = None,
        beside: Mapping[str, Prediction] | None = None,
    ) -> None:
        self.chosen, self.budget, self.plain, self.beside = chosen, budget, plain, dict(beside or {})
        self._others = {one.settings: one for one in (*predictions, chosen)}
        self.frontier = undominated(list(self._others.values()), lambda one: (one.peak_bytes, one.seconds))
        self._loss = loss

    @property
    def settings(self) -> Settings:
        return self.chosen.settings

    @property
    def peak_bytes(self) -> int:
        return self.chosen.peak_bytes

    @property
    def seconds(self) -> float:
        return self.chosen.seconds

    def apply_(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None = None,
        directory: str | Path | None = None,
        **options: Any,
    ) -> Run:
        """Make ``model`` train by the plan, in place; returns its ``Run``, with ``step(batch)`` and ``optimizer``.

        ``loss``: that of ``lb.fit`` unless given. ``directory``: where states and activations on disk go, the system's
        for temporary files unless given, and host memory for a model on a GPU. ``options``: of the optimizer, such as
        ``lr`` and ``weight_decay``.
        """
        predictions = list(self._others.values())
        return Run(model, self.settings, loss or self._loss, directory, options, predictions, self.plain.peak_bytes)

    # -- for people ----------------------------------------------------------------------------------------------
    def __str__(self) -> str:
        lines = [
            f"budget {amount(self.budget)}: a step holds {amount(self.peak_bytes)}"
            + (f" in {self.chosen.moment}" if self.chosen.moment else "")
            + f", plain training {amount(self.plain.peak_bytes)}"
        ]
        rows = [("choice", "is", "saves", "takes", "recorded loss", "which means")]
        for dimension, choice in described(self.settings).items():
            loss = f"{choice.loss:+.2f}%" if choice.loss else ""
            rows.append((dimension, choice.name, *self._beside(dimension), loss, choice.about))
        parts = self.settings.micro
        about = "the whole batch at once" if parts == 1 else "gradients of the parts add up"
        rows.append((PARTS, str(parts), *self._beside(PARTS), "", about))
        return "\n".join([*lines, "", aligned(rows, (2, 3, 4))])

    def _beside(self, dimension: str) -> tuple[str, str]:
        """Bytes saved, and time taken, beside the plain choice."""
        other = self.beside.get(dimension)
        if other is None:
            return "", ""
        time = (self.seconds - other.seconds) / max(other.seconds, 1e-12)
        return amount(other.peak_bytes - self.peak_bytes), f"{time:+.0%}"

    def table(self) -> str:
        """The frontier and what is chosen: peaks and times, smallest first."""
        rows = [("peak", "time", "settings")]
        for one in sorted({self.chosen, *self.frontier}, key=lambda one: one.peak_bytes):
            mark = " (chosen)" if one.settings == self.settings else ""
            rows.append((amount(one.peak_bytes), f"{one.seconds / self.plain.seconds:.2f}", words(one.settings) + mark))
        return aligned(rows, (0, 1))

    def _refits(self) -> list[Prediction]:
        """The predictions of this arithmetic, the fastest first: what ``Run.refit`` chooses from."""
        found = [one for one in self._others.values() if alike(one.settings, self.settings)]
        return sorted(found, key=lambda one: (one.seconds, one.peak_bytes))

    def plot(self, path: str | Path) -> Path:
        """Draw the frontier with the budget and what is chosen, as PNG. Raises ImportError without matplotlib."""
        return plot(self, Path(path))

    # -- files -----------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "budget": self.budget, "chosen": _plain_values(self.chosen), "plain": _plain_values(self.plain),
            "frontier": [_plain_values(one) for one in self.frontier],
            "beside": {name: _plain_values(one) for name, one in self.beside.items()},
            "refits": [_plain_values(one) for one in self._refits()],
            "machine": {"cpu": cpu_name(), "threads": torch.get_num_threads(), "lowbit": __version__},
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON."""
        write_json(Path(path), self.as_dict())
        return Path(path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """A plan that was saved; the loss is none that a file holds, give it to ``apply_``.

        Raises ValueError for a file that holds no plan of this version.
        """
        data = read_json(Path(path))
        try:
            chosen, plain, *others = map(_read, (data["chosen"], data["plain"], *data["frontier"], *data["refits"]))
            beside = {name: _read(one) for name, one in data["beside"].items()}
            return cls(chosen, data["budget"], plain, others, beside=beside)
        except (KeyError, TypeError) as error:
            raise ValueError(f"fit: {path} holds no plan that this lowbit reads ({error}); make it again") from None


def _plain_values(prediction: Prediction) -> dict[str, Any]:
    return {**prediction._asdict(), "settings": asdict(prediction.settings)}


def _read(data: dict[str, Any]) -> Prediction:
    settings = dict(data["settings"])
    if isinstance(settings["checkpoint"], list):
        settings["checkpoint"] = tuple(settings["checkpoint"])
    return Prediction(**{**data, "settings": Settings(**settings)})
