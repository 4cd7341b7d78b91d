"""Base class of plans: the chosen settings, the frontier of alternatives, and a JSON file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from lowbit.files import read_json, write_json
from lowbit.plan.frontier import undominated
from lowbit.sizes import amount
from lowbit.tables import aligned

__all__ = ["BasePlan", "plain_values"]

#: For each task: its name in errors, and the class of ``lowbit.plan`` that loads its plans.
_TASKS = {"train": ("training", "TrainingPlan"), "generate": ("generation", "GenerationPlan")}

#: A named tuple with ``settings`` (a dataclass) and ``peak_bytes``.
_Prediction = TypeVar("_Prediction", bound=Any)
_Settings = TypeVar("_Settings")
_Plan = TypeVar("_Plan", bound="BasePlan[Any, Any]")


class BasePlan(Generic[_Prediction, _Settings]):
    """A plan for a memory budget.

    Attributes:
        chosen: Prediction for the chosen settings.
        settings: The chosen settings.
        peak_bytes: Predicted peak.
        budget: Limit on the peak in bytes.
        plain: Prediction for the unchanged model.
        frontier: Predictions for which no other is both smaller and cheaper.
    """

    #: A key of ``_TASKS``, and the classes of the predictions and of their settings.
    _task: ClassVar[str]
    _classes: ClassVar[tuple[type[Any], type[Any]]]

    def __init__(
        self,
        chosen: _Prediction,
        budget: int,
        plain: _Prediction,
        predictions: Iterable[_Prediction],
        cost: Callable[[_Prediction], float],
    ) -> None:
        self.chosen, self.budget, self.plain = chosen, budget, plain
        self.settings: _Settings = chosen.settings
        self.peak_bytes: int = chosen.peak_bytes
        self.frontier = undominated([*predictions, chosen], lambda row: (row.peak_bytes, cost(row)))

    def _table(
        self, head: str, predictions: Iterable[_Prediction], shown: Callable[[_Prediction], tuple[str, str]]
    ) -> str:
        """Return a table of predictions. ``shown`` returns the cost, for the column ``head``, and the settings."""
        rows = [("peak", head, "settings")]
        for prediction in predictions:
            cost, words = shown(prediction)
            chosen = " (chosen)" if prediction is self.chosen else ""
            rows.append((amount(prediction.peak_bytes), cost, words + chosen))
        return aligned(rows, (0, 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BasePlan) and type(other) is type(self) and other.as_dict() == self.as_dict()

    def __hash__(self) -> int:
        return hash((self.budget, self.peak_bytes))

    # -- files ---------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        return {
            "budget": self.budget, "chosen": plain_values(self.chosen), "plain": plain_values(self.plain),
            "frontier": [plain_values(prediction) for prediction in self.frontier],
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write the plan to a JSON file and return its path."""
        write_json(Path(path), self.as_dict())
        return Path(path)

    @classmethod
    def load(cls: type[_Plan], path: str | Path) -> _Plan:
        """Load a saved plan. Raises ValueError for a file without a plan for this task and version."""
        data = read_json(Path(path))
        task, other = _TASKS[cls._task], _TASKS.get(str(data.get("task", "train")))  # training is not named in files
        if "chosen" in data and other not in (None, task):
            raise ValueError(
                f"fit: expected a plan for {task[0]} in {path}, got one for {other[0]}; use lb.plan.{other[1]}.load"
            )
        try:
            return cls._of(data)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"fit: {path} has no plan for {task[0]} that this version of lowbit can read ({error}); plan again"
            ) from None

    @classmethod
    def _of(cls: type[_Plan], data: dict[str, Any]) -> _Plan:
        """Return the plan of ``as_dict`` data. Other data raise a Python error."""
        raise NotImplementedError

    @classmethod
    def _read(cls, values: dict[str, Any]) -> _Prediction:
        """Return the prediction of ``plain_values`` data."""
        prediction_class, settings_class = cls._classes
        fields = {name: tuple(v) if isinstance(v, list) else v for name, v in values["settings"].items()}
        prediction: _Prediction = prediction_class(**{**values, "settings": settings_class(**fields)})
        return prediction


def plain_values(prediction: Any) -> dict[str, Any]:
    """Return a prediction as JSON data."""
    return {**prediction._asdict(), "settings": asdict(prediction.settings)}
