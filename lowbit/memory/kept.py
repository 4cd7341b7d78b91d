"""Estimates of a model's activations before and after a function changes it, for the function's report."""

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
    """Estimates activations before a function changes a model; ``told`` adds them to its report.

    Args:
        model: The model before the change. It is not modified.
        batch: An example batch, as for ``lb.estimate``. With None nothing is estimated.
        loss: A function of output and batch, as for ``lb.estimate``.
    """

    def __init__(self, model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None = None) -> None:
        self._given = model, batch, loss
        self._before = None if batch is None else _step(*self._given)

    def told(self, report: Report, layers: bool = True) -> Report:
        """Return ``report`` with the estimates from before and after the change.

        Args:
            report: The report of the function that has changed the model.
            layers: Whether to add activations by layer. Use False if the change moves activations to other layers.
        """
        if self._before is None:
            return report
        before, after = self._before, _step(*self._given)
        for step in (before, after):
            if isinstance(step, str):
                return replace(report, notes=(*report.notes, f"activations are unknown: {step}"))
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
    """Memory of forward and backward.

    Attributes:
        peak: Peak in bytes.
        kept: Bytes of activations at the end of the forward, by layer.
    """

    peak: int
    kept: Counter[str]


def _step(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Tensor] | None) -> _Step | str:
    """Return the estimate, or the reason why there is none, since the report must not fail for lack of an estimate."""
    try:
        usage = estimate_step(model, batch, loss)
    except Exception as error:
        message = str(error).splitlines()
        return ": ".join([type(error).__name__, *message[:1]])
    ends = next((index for index, op in enumerate(usage.ops) if op.phase == "backward"), len(usage.ops) - 1)
    kept = Counter[str]()
    for holding in usage.held_at(ends):
        if holding.kind == "activations":
            kept[holding.layer] += holding.bytes
    return _Step(usage.peak_bytes, kept)


def _by_row(rows: tuple[LayerReport, ...], before: _Step, after: _Step) -> tuple[LayerReport, ...]:
    """Return the rows with the activations made within their layers. Of nested rows the innermost has them."""
    names = sorted((row.name for row in rows), key=len, reverse=True)

    def sums(step: _Step) -> Counter[str]:
        totals = Counter[str]()
        for layer, size in step.kept.items():
            row = next((name for name in names if not name or layer == name or layer.startswith(f"{name}.")), None)
            if row is not None:
                totals[row] += size
        return totals

    earlier, later = sums(before), sums(after)
    return tuple(replace(row, activations_before=earlier[row.name], activations_after=later[row.name]) for row in rows)
