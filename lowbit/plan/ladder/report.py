"""Writes the results of the ladder: a table, a Markdown page with a plot, and JSON."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowbit.backends.cpu import processor
from lowbit.files import write_atomically, write_json
from lowbit.machine import provenance
from lowbit.plan.ladder.ascent import Ladder, Row
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.ladder.shape import textbook
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["NUMBERS", "explained", "remarks", "setting", "table", "write"]

#: Head of the table; its last column exists only with a search. ``NUMBERS``: numeric columns.
HEAD = ("rung", "peak, MiB", "of fp32", "trains", "s per step", "tokens/s", "loss", "losses", "largest")
NUMBERS = (1, 2, 4, 5, 6)

_ALIKE = {
    ("equal", True): "equal", ("equal", False): "NOT EQUAL", ("close", True): "close", ("close", False): "NOT CLOSE",
}  # fmt: skip
_FITS, _OVER, _INK, _BAR = "#2b8a3e", "#d9480f", "#1f2933", "#2f6fde"


def table(ladder: Ladder) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the head and the rows of the table."""
    first, columns = ladder.rows[0].whole, len(HEAD) if ladder.climb.search else len(HEAD) - 1
    rows = [_cells(ladder, row, None if first is None else first.peak) for row in ladder.rows]
    return HEAD[:columns], [row[:columns] for row in rows]


def _cells(ladder: Ladder, row: Row, base: int | None) -> tuple[str, ...]:
    whole, trains = row.whole, "yes" if row.limited.fits else "no"
    alike = "" if row.alike is None else _ALIKE[row.rung.losses, row.alike]
    if whole is None or whole.seconds is None:
        return (row.rung.name, "", "", trains, "", "", "", alike, _largest(row))
    return (
        row.rung.name, f"{whole.peak / 2**20:,.0f}", f"{whole.peak / base:.0%}" if base else "", trains,
        f"{whole.seconds:.2f}", f"{ladder.shape.tokens / whole.seconds:,.0f}", f"{whole.losses[-1]:.4f}", alike,
        _largest(row),
    )  # fmt: skip


def _largest(row: Row) -> str:
    if row.largest is None:
        return ""
    untried = "" if row.beyond == row.largest.size + 1 else "+"
    return f"{row.largest.parameters / 1e6:.0f}M{untried}"


def remarks(ladder: Ladder) -> list[str]:
    """Return a line for each rung: its description, where memory ran out, and whether it is left out."""
    lines = []
    for row in ladder.rows:
        shape = row.largest
        sentences = [
            f"{row.rung.about}.",
            *([] if row.limited.fits else [f"Under the limit memory runs out in {row.limited.ran_out}."]),
            *([] if row.kept else ["It does not lower the peak here, so the following rungs do not include it."]),
            *([] if shape is None else [f"Its largest model has {shape.layers} layers of width {shape.width}."]),
        ]
        lines.append(f"{row.rung.name}: {' '.join(sentences)}")
    return lines


def setting(ladder: Ladder) -> str:
    """Return a description of the model and the budget."""
    shape, kinds = ladder.shape, textbook(ladder.shape)
    total = sum(kinds.values())
    return (
        f"A transformer of {shape.parameters / 1e6:.1f}M parameters ({shape.layers} layers, width {shape.width}), "
        f"{shape.batch} x {shape.context} tokens per step. According to the textbook, fp32 needs {amount(total)} ("
        + ", ".join(f"{kind} {amount(size)}" for kind, size in kinds.items())
        + f"), {total / ladder.climb.budget:.2f} times the budget of {amount(ladder.climb.budget)}."
    )


def explained(ladder: Ladder) -> str:
    """Return an explanation of the columns."""
    held = amount(ladder.rows[0].limited.before)
    lines = [
        "Each rung adds to the rungs above it.",
        f"The peak is {LIMITS[ladder.climb.device].unit} after the first step, minus the {held} that the process uses "
        "before the model is created. The limit starts from the same value.",
        "If a rung does not train under the limit, peak, time and loss are from a run without the limit.",
        "Losses are bit-identical to the rung above (equal), close (another order of sums), or of another arithmetic "
        "(no entry).",
    ]
    if ladder.climb.search:
        lines.append(
            "The largest is the largest model of the same family that trains under the limit (+: larger ones were not "
            "tried)."
        )
    return " ".join(lines)


def write(directory: Path, ladder: Ladder, command: str) -> Path:
    """Write ``ladder.md``, ``ladder.json`` and, with matplotlib, ``ladder.png``; return the path of the first."""
    plots = find_spec("matplotlib") is not None
    if plots:
        _plot(directory / "ladder.png", ladder)
    origin = provenance(command, kernels=processor())
    write_json(directory / "ladder.json", {**ladder.to_dict(), "made": origin})
    lines = [
        "# The ladder of memory-efficient training", "", setting(ladder), "",
        *(["![peak memory of each rung](ladder.png)", ""] if plots else []),
        markdown(*table(ladder), NUMBERS), "", explained(ladder), "",
        *(f"- {line}" for line in remarks(ladder)), "",
        "## How it was made", "", *(f"- {key}: {value}" for key, value in origin.items()),
    ]  # fmt: skip
    text = "\n".join(lines).encode() + b"\n"
    write_atomically(directory / "ladder.md", lambda file: file.write(text))
    return directory / "ladder.md"


# -- the plot ---------------------------------------------------------------------------------------------------------
def _plot(path: Path, ladder: Ladder) -> None:
    from matplotlib.figure import Figure

    names = [row.rung.name for row in ladder.rows]
    panels = 2 if ladder.climb.search else 1
    figure = Figure(figsize=(6.5 * panels, 0.5 * len(names) + 1.2), layout="constrained")
    peaks, *sizes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    gib = [0.0 if row.whole is None else row.whole.peak / 2**30 for row in ladder.rows]
    bars = peaks.barh(names, gib, color=[_FITS if row.limited.fits else _OVER for row in ladder.rows])
    peaks.bar_label(bars, [f"{value:.2f}" for value in gib], padding=3)
    peaks.axvline(ladder.climb.budget / 2**30, color=_INK, ls="--")
    peaks.set_title(f"peak step memory, {ladder.shape.parameters / 1e6:.0f}M parameters, GiB (dashed: budget)", size=10)
    millions = [0.0 if row.largest is None else row.largest.parameters / 1e6 for row in ladder.rows]
    for axes in sizes:
        bars = axes.barh(names, millions, color=_BAR)
        axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in millions], padding=3)
        axes.set_title("largest model that trains within the budget, millions", size=10)
    for axes in (peaks, *sizes):
        axes.margins(x=0.15)
        _bare(axes)
    peaks.invert_yaxis()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
