"""Tables (Markdown, CSV) and a plot of measured cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.backends.cpu import processor
from lowbit.evaluate.cell import FLOATS, PACKED
from lowbit.evaluate.metrics import Estimate
from lowbit.evaluate.peers import PEERS
from lowbit.evaluate.run import Cell, default_of
from lowbit.evaluate.tasks import TASKS, Figure, Task
from lowbit.files import write_atomically
from lowbit.machine import provenance
from lowbit.tables import csv_text, markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["as_json", "figures", "rows", "write"]

#: The files that ``write`` writes.
MARKDOWN, TABLE, PLOT = "evaluate.md", "evaluate.csv", "evaluate.png"

_MIB = 2**20
_INK, _PALE, _BAR, _FLAGGED = "#1f2933", "#9aa5b1", "#2f6fde", "#e4e7eb"


def write(directory: Path, cells: Sequence[Cell], command: str) -> list[Path]:
    """Write the tables, and the plot if matplotlib is installed; return the paths."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {MARKDOWN: "\n".join(_markdown(cells, command)) + "\n", TABLE: csv_text(rows(cells), last="note")}
    for name, text in files.items():
        data = text.encode()
        write_atomically(directory / name, lambda file, data=data: file.write(data))  # type: ignore[misc]
    paths = [directory / name for name in files]
    if find_spec("matplotlib") is not None and any(_measured(cell) for cell in cells):
        _plot(directory / PLOT, cells)
        paths.append(directory / PLOT)
    return paths


# -- figures ---------------------------------------------------------------------------------------------------------
def _measured(cell: Cell) -> bool:
    return cell.result is not None and "refused" not in cell.result


def _groups(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells by model, in order."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.model.name, []).append(cell)
    return groups


def _baseline(cells: Sequence[Cell]) -> Cell | None:
    return next((cell for cell in cells if cell.baseline and _measured(cell)), None)


def figures(cell: Cell, baseline: Cell | None) -> dict[str, Estimate]:
    """The quality of a measured cell, by title.

    Raises:
        ValueError: The cell and its baseline were measured on different data.
    """
    if not _measured(cell) or baseline is None:
        return {}
    assert cell.result is not None and baseline.result is not None
    if cell.result["data_sha256"] != baseline.result["data_sha256"]:
        raise ValueError(
            f"{cell.request.name} was measured on other data than {baseline.request.name} in "
            f"{baseline.request.table}; measure both again with --overwrite"
        )
    quality = {}
    for figure in TASKS[cell.result["task"]].figures:
        ours, theirs = (result["values"].get(figure.metric) for result in (cell.result, baseline.result))
        if ours is not None and theirs is not None:
            quality[figure.title] = figure.estimate(ours, theirs)
    return quality


def rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """One dictionary per cell, as in the CSV; missing values are None."""
    table = []
    for group in _groups(cells).values():
        baseline = _baseline(group)
        for cell in group:
            result = cell.result or {}
            row: dict[str, Any] = {
                "model": cell.model.name, "recipe": cell.request.recipe, "layout": cell.request.layout,
                "method": cell.request.method,
                "dtype": cell.request.dtype,
            }  # fmt: skip
            for title, estimate in figures(cell, baseline).items():
                row[title], row[f"{title}, standard error"] = estimate
            if _measured(cell):
                items = next(iter(result["values"].values()))
                row["items"], row["units"] = len(items), TASKS[result["task"]].units
            for name in (
                "bytes", "peak_bytes", "seconds_to_calibrate", "peak_bytes_to_calibrate", "seconds_to_quantize",
                "seconds_to_pack", "units_per_second", "generated_per_second", "weight_error", "converted",
            ):  # fmt: skip
                row[name] = result.get(name)
            table.append({**row, "left": len(result.get("left", ())), "note": cell.note})
    return table


def as_json(cells: Sequence[Cell]) -> dict[str, Any]:
    """The table as JSON values."""
    return {"cells": rows(cells)}


# -- Markdown --------------------------------------------------------------------------------------------------------
def _markdown(cells: Sequence[Cell], command: str) -> list[str]:
    lines = ["# lowbit evaluate: quality, size and speed of quantized models", ""]
    for group in _groups(cells).values():
        lines += _section(group)
    lines += [
        "Each row is measured in a separate process. Quality has its standard error over the items of the data; "
        "changes are paired with the baseline item by item. Peak memory is the peak of the process during evaluation, "
        "including Python and torch. In rows marked *not meaningful* the stored weights are already on the recipe's "
        "grid, so they say nothing about other models.",
        "",
        f"![quality loss of each recipe]({PLOT})" if find_spec("matplotlib") else "",
        "",
        "## How it was made",
        "",
        *[f"- {key}: {value}" for key, value in provenance(command, kernels=processor()).items()],
    ]
    return lines


def _section(group: list[Cell]) -> list[str]:
    """The section of one model."""
    model, baseline = group[0].model, _baseline(group)
    lines = [f"## {model.name}", "", f"{model.about}. Weights: SHA-256 {group[0].request.key['weights']}."]
    if baseline is None:
        lines += ["", f"The baseline ({group[0].request.dtype}) could not be measured, so there is no table.", ""]
        return [*lines, *(f"- {cell.request.recipe} {cell.request.layout}: {cell.note}" for cell in group), ""]
    result = baseline.result
    assert result is not None
    task = TASKS[result["task"]]
    items = len(next(iter(result["values"].values())))
    lines += [
        f"Data: {items} {task.items} of {result['data']} (SHA-256 of the inputs {result['data_sha256'][:16]}; of the "
        f"text or its replacement {group[0].request.key['data']}). Baseline, and dtype of unquantized parts: "
        f"{group[0].request.dtype}. {result['threads']} threads.",
        "",
        _table(group, baseline, task),
        "",
    ]
    return lines


def _table(group: list[Cell], baseline: Cell, task: Task) -> str:
    generates = any(cell.result and cell.result.get("generated_per_second") for cell in group)
    calibrated = any(cell.request.method for cell in group)
    head = [
        "recipe", "method" if calibrated else "layout", *(figure.title for figure in task.figures), "MiB",
        f"of {baseline.request.recipe}", "peak MiB", *(["calibrate, s", "its peak MiB"] if calibrated else []),
        "quantize, s", f"{task.units}/s", *(["generated tokens/s"] if generates else []), "note",
    ]  # fmt: skip

    def row(cell: Cell) -> list[str]:
        result, quality = cell.result or {}, figures(cell, baseline)
        assert baseline.result is not None
        size = result.get("bytes")
        calibration = (
            _number(result.get("seconds_to_calibrate"), ".1f"),
            _number(result.get("peak_bytes_to_calibrate", 0) / _MIB or None, ".0f"),
        )
        return [
            cell.request.recipe,
            _method(cell) if calibrated else cell.request.layout,
            *(_written(figure, quality.get(figure.title), cell.baseline) for figure in task.figures),
            _number(size and size / _MIB, ".1f"),
            _number(size and size / baseline.result["bytes"], ".0%"),
            _number(result.get("peak_bytes", 0) / _MIB or None, ".0f"),
            *(calibration if calibrated else ()),
            _number(result.get("seconds_to_quantize"), ".2f"),
            _number(result.get("units_per_second"), ",.4g"),
            *([_number(result.get("generated_per_second"), ".3g")] if generates else []),
            cell.note,
        ]

    return markdown(head, map(row, group), numbers=range(2, len(head) - 1))


def _method(cell: Cell) -> str:
    """The calibration or data-free method of a row."""
    if cell.request.recipe in PEERS or cell.request.recipe in FLOATS:
        return ""
    return cell.request.method or default_of(cell.request.recipe)


def _number(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def _written(figure: Figure, estimate: Estimate | None, baseline: bool) -> str:
    """A figure with its error; the baseline has no change."""
    if estimate is None or (baseline and figure.title == "change"):
        return ""
    value, error = estimate
    sign = "+" if figure.title == "change" else ""
    if figure.percent:
        return f"{value:{sign}.2%}" + ("" if error is None else f" ± {error:.2%}")
    return f"{value:.5g}" + ("" if error is None else f" ± {error:.2g}")


# -- plot ------------------------------------------------------------------------------------------------------------
def _plot(path: Path, cells: Sequence[Cell]) -> None:
    """Plot the quality loss of each recipe as bars on a logarithmic axis, with one panel per model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = {name: group for name, group in _groups(cells).items() if _baseline(group) is not None}
    if not groups:
        return
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": _PALE}
    tallest = max(sum(cell.request.layout != PACKED for cell in group) for group in groups.values())
    with plt.rc_context(style):
        figure, panels = plt.subplots(
            1, len(groups), figsize=(4.2 * len(groups), 1 + 0.24 * tallest), squeeze=False, layout="constrained"
        )
        for panel, group in zip(panels[0], groups.values(), strict=True):
            _panel(panel, group)
        write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))
        plt.close(figure)


def _panel(panel: Axes, group: list[Cell]) -> None:
    baseline = _baseline(group)
    assert baseline is not None and baseline.result is not None
    figure = next(figure for figure in TASKS[baseline.result["task"]].figures if figure.loss is not None)
    assert figure.loss is not None
    names, losses, errors, colors = [], [], [], []
    for cell in group:
        estimate = figures(cell, baseline).get(figure.title)
        if estimate is None or cell.request.layout == PACKED or not math.isfinite(estimate.value):
            continue
        names.append(" ".join(filter(None, (cell.request.recipe, cell.request.method))))
        losses.append(max(figure.loss(estimate.value), 0.0))
        errors.append(estimate.error or 0.0)
        colors.append(_FLAGGED if cell.note else _BAR)
    panel.barh(names, losses, xerr=errors, color=colors, ecolor=_INK, capsize=2)
    panel.invert_yaxis()
    panel.set_xscale("symlog", linthresh=max(losses, default=0) / 100 or 1.0)
    panel.minorticks_off()
    panel.set_xlim(left=0)
    panel.set_title(group[0].model.name, color=_INK, fontsize=10)
    panel.set_xlabel("quality loss: " + ("1 - cosine" if "cosine" in figure.title else "increase of perplexity"))
