"""The ladder of estimated peaks: peak and time of each rung on a model of the user, at the size that the model has.

The ladder of ``ascent`` trains its own transformer in processes with a limit, and scales it. A model of the user has
one size and its own batch, so here every rung is an estimate of one step, as in a plan of ``lb.fit``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowbit.plan.base import plain_values
from lowbit.plan.fitting.choices import has_half
from lowbit.plan.fitting.identity import check_mode
from lowbit.plan.fitting.predict import Prediction, Predictor
from lowbit.plan.ladder.ascent import LOWER
from lowbit.plan.ladder.rungs import RUNGS, Rung
from lowbit.plan.settings import TrainingSettings
from lowbit.plan.subject import Subject
from lowbit.plan.techniques import conflict, loaded
from lowbit.progress import Progress
from lowbit.sizes import amount, budget_in, share_changed
from lowbit.tables import aligned

__all__ = ["NUMBERS", "EstimatedLadder", "EstimatedRow", "estimate_ladder"]

#: Numeric columns of the table.
NUMBERS = (1, 2, 3)


@dataclass(frozen=True)
class EstimatedRow:
    """A rung on the user's model.

    Attributes:
        rung: The rung.
        prediction: Its settings with the rungs below, peak and time; None if it does not apply.
        kept: Whether the rungs above include it.
        reason: Why it is left out, or "".
    """

    rung: Rung
    prediction: Prediction | None
    kept: bool
    reason: str = ""


@dataclass(frozen=True)
class EstimatedLadder:
    """The ladder of estimated peaks. ``print`` shows a table. ``budget`` is in bytes, or None."""

    rows: tuple[EstimatedRow, ...]
    budget: int | None

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return the head and the rows of the table."""
        head = ("rung", "peak", "of the first", "s per step")
        first = next(row.prediction for row in self.rows if row.prediction is not None)
        rows = [self._cells(row, first.peak_bytes) for row in self.rows]
        return (head if self.budget is None else (*head, "fits")), rows

    def _cells(self, row: EstimatedRow, first: int) -> tuple[str, ...]:
        prediction = row.prediction
        if prediction is None:
            cells: tuple[str, ...] = (row.rung.name, "", "", "")
            return cells if self.budget is None else (*cells, "")
        cells = (
            row.rung.name,
            amount(prediction.peak_bytes),
            f"{prediction.peak_bytes / first:.0%}",
            f"{prediction.seconds:.3g}",
        )
        return cells if self.budget is None else (*cells, "yes" if prediction.peak_bytes <= self.budget else "no")

    def remarks(self) -> list[str]:
        """Return a line for each rung: its description, and why it is left out."""
        return [
            f"{row.rung.name}: {row.rung.about}." + (f" Left out: {row.reason}." if row.reason else "")
            for row in self.rows
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return JSON data."""
        rows = [
            {
                "name": row.rung.name, "kept": row.kept, "reason": row.reason,
                "prediction": None if row.prediction is None else plain_values(row.prediction),
            }
            for row in self.rows
        ]  # fmt: skip
        return {"budget": self.budget, "rungs": rows}

    def __str__(self) -> str:
        head, rows = self.table()
        return aligned([head, *rows], NUMBERS)


def estimate_ladder(
    subject: Subject,
    budget: str | int | None = None,
    rungs: Sequence[Rung] = RUNGS,
    progress: Progress = lambda what, done, total: None,
) -> EstimatedLadder:
    """Estimate ``rungs`` in order, each on top of the rungs below that lower the peak. The model does not change.

    Args:
        subject: Model in training mode, batch and loss.
        budget: Bytes, a size such as ``"2GiB"``, or a share of the first rung such as ``"60%"``.
        rungs: The rungs; the first is plain training.
        progress: Called as ``progress(what, done, total)``.

    Raises:
        ValueError: As ``lb.fit``.
        TypeError: As ``lb.fit``.
    """
    limit = None if budget is None else budget_in(budget, "ladder")
    check_mode(subject.model, "ladder")
    predictor, rows = Predictor(subject), list[EstimatedRow]()
    progress(rungs[0].name, 0, len(rungs))
    plain = TrainingSettings(bf16_params=has_half(subject.model), loaded=loaded(subject.model))
    below = predictor.whole(plain)
    rows.append(EstimatedRow(rungs[0], below, True))
    for number, rung in enumerate(rungs[1:], 1):
        progress(rung.name, number, len(rungs))
        row = _row(predictor, rung, below)
        rows.append(row)
        if row.kept and row.prediction is not None:
            below = row.prediction
    progress("done", len(rungs), len(rungs))
    first = rows[0].prediction
    assert first is not None
    return EstimatedLadder(tuple(rows), None if limit is None else limit.of(first.peak_bytes))


def _row(predictor: Predictor, rung: Rung, below: Prediction) -> EstimatedRow:
    settings = rung.on(below.settings)
    reason = rung.why_not(predictor.subject) or conflict(settings)
    if reason is None and settings.micro_batches > 1:
        settings = replace(settings, micro_batches=max(n for n in predictor.counts() if n <= settings.micro_batches))
    if reason is None and settings == below.settings:
        reason = "the batch cannot be split" if "micro_batches" in rung.changes else "the model has it already"
    if reason is not None:
        return EstimatedRow(rung, None, False, reason)
    prediction = predictor.whole(settings)
    if prediction.peak_bytes < LOWER * below.peak_bytes:
        return EstimatedRow(rung, prediction, True)
    change = share_changed(prediction.peak_bytes / below.peak_bytes - 1)
    return EstimatedRow(rung, prediction, False, f"it does not lower the peak here ({change})")
