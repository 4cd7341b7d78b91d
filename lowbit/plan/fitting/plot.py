"""Plot of a plan's frontier: peak memory of a step, and its time relative to plain training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.files import write_atomically
from lowbit.plan.fitting.choices import words
from lowbit.plan.fitting.predict import Prediction
from lowbit.sizes import amount

__all__ = ["plot"]

_LINE, _CHOSEN, _INK, _PALE = "#2f6fde", "#2b8a3e", "#1f2933", "#9aa5b1"

#: Least distance of labelled points, as shares of both axes.
_APART = (0.4, 0.05)


class _Point(NamedTuple):
    """A peak in the unit of the axis, a time relative to plain training, and the settings in words."""

    peak: float
    time: float
    text: str


def plot(plain: Prediction, chosen: Prediction, frontier: Sequence[Prediction], budget: int, path: Path) -> Path:
    """Write the frontier, the budget and the chosen settings to a PNG file. Raises ImportError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("TrainingPlan.plot needs matplotlib: pip install matplotlib") from None
    largest = max(plain.peak_bytes, budget, *(prediction.peak_bytes for prediction in frontier))
    unit, name = (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")
    choice, usual, *points = (
        _Point(prediction.peak_bytes / unit, prediction.seconds / plain.seconds, words(prediction.settings))
        for prediction in (chosen, plain, *frontier)
    )
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    axes.step(
        [point.peak for point in points],
        [point.time for point in points],
        "o-",
        where="post",
        color=_LINE,
        lw=1,
        label="least time by peak",
    )
    axes.plot(usual.peak, usual.time, "s", color=_PALE, label="plain training")
    axes.plot(choice.peak, choice.time, "o", ms=11, mfc="none", mec=_CHOSEN, mew=2, label="chosen")
    axes.axvline(budget / unit, color=_INK, ls="--", lw=1, label="budget")
    for point in _apart([choice, usual, points[0], *points[::-1]]):
        _label(axes, point, bold=point is choice)
    axes.set(xlabel=f"peak step memory, {name}", ylabel="step time, relative to plain training")
    axes.set_title(f"{words(chosen.settings)}: {amount(chosen.peak_bytes)} of {amount(budget)}", loc="left", size=10)
    axes.margins(x=0.22, y=0.12)
    axes.set_xlim(left=0)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))
    return path


def _apart(points: list[_Point]) -> list[_Point]:
    """Return the points whose labels do not overlap; earlier points take precedence."""
    peaks, times = [point.peak for point in points], [point.time for point in points]
    width, height = _APART[0] * (max(peaks) - min(peaks)), _APART[1] * (max(times) - min(times))
    labelled: list[_Point] = []
    for point in points:
        if all(abs(point.peak - other.peak) > width or abs(point.time - other.time) > height for other in labelled):
            labelled.append(point)
    return labelled


def _label(axes: Any, point: _Point, bold: bool) -> None:
    axes.annotate(
        point.text, (point.peak, point.time), xytext=(6, 6), textcoords="offset points", size=8, color=_INK,
        weight="bold" if bold else "normal", bbox={"fc": "white", "ec": "none", "pad": 0.5},
    )  # fmt: skip
