"""The activations that a function changes: estimates of a step before and after it, for its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit.memory.estimator import estimate_step
from lowbit.report import LayerReport, Report

__all__ = ["Kept"]


class Kept:
    """What a step keeps of a model before a function changes it; ``told`` looks again, and says both in the report.

    Args:
        model: Before the change. It stays as it is.
        batch: As ``lb.estimate`` takes it. With None nothing is estimated.
        loss: As ``lb.estimate`` takes it.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        self._given = model, batch, loss
        self._before = None if batch is None else _step(*self._given)

    def told(self, report: Report, layers: bool = True) -> Report:
        """``report`` with the estimates of before and of now.

        Args:
            report: Of the function that has changed the model.
            layers: Whether each layer says what is made within it. Not if tensors change the layer that makes them.
        """
        if self._before is None:
            return report
        before, after = self._before, _step(*self._given)
        for found in (before, after):
            if isinstance(found, str):
                return replace(report, notes=(*report.notes, f"activations are not known: {found}"))
        assert not isinstance(before, str) and not isinstance(after, str)
        return replace(
            report,
            layers=_by_row(report.layers, before, after) if layers else report.layers,
            activations_before=sum(before.kept.values()),
            activations_after=sum(after.kept.values()),
            peak_before=before.peak,
            peak_after=after.peak,
        )


class _Step(NamedTuple):
    """Bytes of forward and backward: the peak, and by layer the activations that are kept when the forward ends."""

    peak: int
    kept: Counter[str]


def _step(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> _Step | str:
    """The estimate, or why there is none: the function that is reported does its work without it."""
    try:
        found = estimate_step(model, batch, loss)
    except Exception as error:
        said = str(error).splitlines()
        return ": ".join([type(error).__name__, *said[:1]])
    ends = next((index for index, op in enumerate(found.ops) if op.phase == "backward"), len(found.ops) - 1)
    kept = Counter[str]()
    for holding in found.held_at(ends):
        if holding.kind == "activations":
            kept[holding.layer] += holding.bytes
    return _Step(found.peak_bytes, kept)


def _by_row(rows: tuple[LayerReport, ...], before: _Step, after: _Step) -> tuple[LayerReport, ...]:
    """The rows with what is made within their layers. Of nested layers the innermost row has it."""
    names = sorted((row.name for row in rows), key=len, reverse=True)

    def sums(step: _Step) -> Counter[str]:
        found = Counter[str]()
        for layer, size in step.kept.items():
            row = next((name for name in names if not name or layer == name or layer.startswith(f"{name}.")), None)
            if row is not None:
                found[row] += size
        return found

    earlier, later = sums(before), sums(after)
    return tuple(replace(row, activations_before=earlier[row.name], activations_after=later[row.name]) for row in rows)
