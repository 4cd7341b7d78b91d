"""The rungs of the ladder: the techniques with a ``rung``, each added to the rungs below."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import STRATEGY, TECHNIQUES, techniques

__all__ = ["RUNGS", "Rung", "rungs_of"]


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder."""

    name: str
    """Names of its techniques."""
    changes: Mapping[str, Any]
    """The fields of ``TrainingSettings`` that it sets."""
    about: str
    """Description."""
    losses: Literal["equal", "close", "own"] = "own"
    """Effect on losses compared with the rung below, as ``Technique.results``."""
    why_not: Callable[[Subject], str | None] = lambda subject: None
    """Returns why it has no effect on a subject, as the end of a sentence; None if it has an effect."""

    def on(self, below: TrainingSettings) -> TrainingSettings:
        """Return the settings ``below`` with the changes of this rung."""
        return replace(below, **self.changes)


def _rung(number: int) -> Rung:
    rows = [technique for technique in techniques() if technique.rung == number]
    (results,) = {row.results for row in rows}
    changes = {name: value for row in rows for name, value in {**row.needs, **row.changes}.items()}

    def why_not(subject: Subject) -> str | None:
        return next((reason for row in rows if (reason := row.why_not(subject)) is not None), None)

    return Rung(", ".join(row.name for row in rows), changes, "; ".join(row.about for row in rows), results, why_not)


RUNGS = tuple(map(_rung, sorted({technique.rung for technique in techniques() if technique.rung is not None})))


def rungs_of(gpus: int) -> tuple[Rung, ...]:
    """Return the rungs of a ladder of up to ``gpus`` processes.

    For one process these are ``RUNGS``. For more they are plain training, checkpointing and sharding strategies; all
    processes have the same batch, so the mean of the gradients equals the gradient of one process.

    Raises:
        ValueError: If ``gpus`` is not a power of two, because the mean would round.
    """
    if gpus == 1:
        return RUNGS
    if gpus < 1 or gpus & (gpus - 1):
        raise ValueError(f"ladder: expected 1, 2, 4, ... processes, whose means are exact, got {gpus}")
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
