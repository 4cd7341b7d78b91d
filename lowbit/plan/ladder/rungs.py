"""The rungs: techniques of ``TECHNIQUES`` with a ``rung``, as what they change of ``TrainingSettings``. Each adds to
those before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowbit.plan.settings import TrainingSettings
from lowbit.plan.techniques import STRATEGY, TECHNIQUES, Technique, techniques

__all__ = ["RUNGS", "Rung", "rungs_of"]


@dataclass(frozen=True)
class Rung:
    """What it ``changes`` of the settings, a sentence on it, and what losses are beside those of the rung below, as
    ``Technique.results``.
    """

    name: str
    changes: Mapping[str, Any]
    about: str
    losses: Literal["equal", "close", "own"] = "own"

    def on(self, below: TrainingSettings) -> TrainingSettings:
        """The settings of this rung on top of those ``below``."""
        return replace(below, **self.changes)


def _rung(together: Iterable[Technique]) -> Rung:
    """The rung of techniques of one place."""
    found = list(together)
    (results,) = {one.results for one in found}
    changes = {name: value for one in found for name, value in {**one.needs, **one.changes}.items()}
    return Rung(", ".join(one.name for one in found), changes, "; ".join(one.about for one in found), results)


_PLACES = sorted({one.rung for one in techniques() if one.rung is not None})

RUNGS = tuple(_rung(one for one in techniques() if one.rung == place) for place in _PLACES)


def rungs_of(gpus: int) -> tuple[Rung, ...]:
    """The rungs of a ladder of up to so many processes: of one, ``RUNGS``; of more, plain training and checkpointing,
    then ways to share the model, each process with the same batch, whose mean of gradients is that of one.

    Raises ValueError for a number that is no power of two: of others the mean rounds.
    """
    if gpus == 1:
        return RUNGS
    if gpus < 1 or gpus & (gpus - 1):
        raise ValueError(f"the ladder has 1, 2, 4, ... processes, whose means are exact, got {gpus}")
    rows = {technique.name: technique for technique in TECHNIQUES[STRATEGY]}
    strategies = [(2, strategy) for strategy in ("zero1", "zero2", "zero3")]
    strategies += [(1 << power, "zero3") for power in range(2, gpus.bit_length())]
    shared = (
        Rung(
            f"{strategy}, {count} processes",
            {"gpus": count, "strategy": strategy},
            rows[strategy].about,
            rows[strategy].results,
        )
        for count, strategy in strategies
    )
    return (*RUNGS[:2], *shared)
