"""What plans of every task share: what is chosen within a budget, a table of what else was to be had, and a file."""

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

#: By the task of ``lb.fit`` what it is called, and which class of ``lowbit.plan`` reads its plans.
_TASKS = {"train": ("training", "TrainingPlan"), "generate": ("generation", "GenerationPlan")}

#: A named tuple with ``settings``, a dataclass, and ``peak_bytes``.
_Prediction = TypeVar("_Prediction", bound=Any)
_Settings = TypeVar("_Settings")
_Plan = TypeVar("_Plan", bound="BasePlan[Any, Any]")


class BasePlan(Generic[_Prediction, _Settings]):
    """``chosen``: the prediction of what the plan does. ``plain``: that of the model as it is. ``frontier``: those that
    nothing is both smaller and cheaper than, by ``cost``.
    """

    #: A key of ``_TASKS``, and the classes of predictions and of their settings.
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
        self.frontier = undominated([*predictions, chosen], lambda one: (one.peak_bytes, cost(one)))

    def _table(self, head: str, of: Iterable[_Prediction], shown: Callable[[_Prediction], tuple[str, str]]) -> str:
        """The peak of each prediction and what is ``shown``, its cost under ``head`` and its settings in words."""
        rows = [("peak", head, "settings")]
        for one in of:
            cost, words = shown(one)
            rows.append((amount(one.peak_bytes), cost, words + (" (chosen)" if one is self.chosen else "")))
        return aligned(rows, (0, 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BasePlan) and type(other) is type(self) and other.as_dict() == self.as_dict()

    def __hash__(self) -> int:
        return hash((self.budget, self.peak_bytes))

    # -- files ---------------------------------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "budget": self.budget, "chosen": plain_values(self.chosen), "plain": plain_values(self.plain),
            "frontier": [plain_values(one) for one in self.frontier],
        }  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON."""
        write_json(Path(path), self.as_dict())
        return Path(path)

    @classmethod
    def load(cls: type[_Plan], path: str | Path) -> _Plan:
        """A plan that was saved. Raises ValueError for a file that holds no plan for this task and of this version."""
        data = read_json(Path(path))
        task, other = _TASKS[cls._task], _TASKS.get(str(data.get("task", "train")))  # training is not named in files
        if "chosen" in data and other not in (None, task):
            raise ValueError(
                f"fit: {path} holds no plan for {task[0]}, but one for {other[0]}; load it by lb.plan.{other[1]}.load"
            )
        try:
            return cls._of(data)
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(
                f"fit: {path} holds no plan for {task[0]} that this lowbit reads ({error}); make it again"
            ) from None

    @classmethod
    def _of(cls: type[_Plan], data: dict[str, Any]) -> _Plan:
        """The plan that ``as_dict`` described. Other data raise an error of Python's."""
        raise NotImplementedError

    @classmethod
    def _read(cls, values: dict[str, Any]) -> _Prediction:
        """The prediction with these ``plain_values``."""
        prediction, settings = cls._classes
        given = {name: tuple(one) if isinstance(one, list) else one for name, one in values["settings"].items()}
        read: _Prediction = prediction(**{**values, "settings": settings(**given)})
        return read


def plain_values(prediction: Any) -> dict[str, Any]:
    """A prediction as plain values, for JSON."""
    return {**prediction._asdict(), "settings": asdict(prediction.settings)}
