"""The ladder as a table, a Markdown page with a plot, and JSON."""

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

#: The head of the table, whose last column is for ladders with a search; the columns of ``NUMBERS`` are numbers.
HEAD = ("rung", "peak, MiB", "of fp32", "trains", "s a step", "tokens/s", "loss", "losses", "largest")
NUMBERS = (1, 2, 4, 5, 6)

_ALIKE = {
    ("equal", True): "equal", ("equal", False): "NOT EQUAL", ("close", True): "close", ("close", False): "NOT CLOSE",
}  # fmt: skip
_FITS, _OVER, _INK, _BAR = "#2b8a3e", "#d9480f", "#1f2933", "#2f6fde"


def table(ladder: Ladder) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The head and the rows of the table."""
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
    more = "" if row.beyond == row.largest.size + 1 else "+"
    return f"{row.largest.parameters / 1e6:.0f}M{more}"


def remarks(ladder: Ladder) -> list[str]:
    """A line on each rung: what it does, where it runs out, that it is left out."""
    found = []
    for row in ladder.rows:
        shape = row.largest
        said = [
            row.rung.about,
            *([] if row.limited.fits else [f"Under the limit it runs out in {row.limited.ran_out}."]),
            *([] if row.kept else ["Here it does not lower the peak, and the rungs below it do without."]),
            *([] if shape is None else [f"Its largest model has {shape.layers} layers of width {shape.width}."]),
        ]
        found.append(f"{row.rung.name}: {' '.join(said)}")
    return found


def setting(ladder: Ladder) -> str:
    """What the table is of."""
    shape, kinds = ladder.shape, textbook(ladder.shape)
    total = sum(kinds.values())
    return (
        f"A transformer of {shape.parameters / 1e6:.1f}M parameters ({shape.layers} layers, width {shape.width}), "
        f"{shape.batch} x {shape.context} tokens a step. By the textbook plain fp32 takes {amount(total)} ("
        + ", ".join(f"{kind} {amount(size)}" for kind, size in kinds.items())
        + f"), {total / ladder.climb.budget:.2f} times the budget of {amount(ladder.climb.budget)}."
    )


def explained(ladder: Ladder) -> str:
    """What the columns are."""
    held = amount(ladder.rows[0].limited.before)
    lines = [
        "Each rung adds to those above it.",
        f"The peak is {LIMITS[ladder.climb.device].unit} in the steps after the first, beyond the {held} that the "
        "process has before the model. The limit is on top of that too.",
        "Of a rung that does not train under the limit, peak, time and loss are of a run without one.",
        "Losses are equal to those of the rung above in every bit, close (another order of sums), or of another "
        "arithmetic (no entry).",
    ]
    if ladder.climb.search:
        lines.append(
            "The largest is the model of the same family that trains under the limit where the next one does not (+: "
            "larger ones were not tried)."
        )
    return " ".join(lines)


def write(directory: Path, ladder: Ladder, command: str) -> Path:
    """Write ``ladder.md``, ``ladder.json`` and, where matplotlib is installed, ``ladder.png``; returns the first."""
    plots = find_spec("matplotlib") is not None
    if plots:
        _plot(directory / "ladder.png", ladder)
    made = provenance(command, kernels=processor())
    write_json(directory / "ladder.json", {**ladder.to_dict(), "made": made})
    lines = [
        "# The ladder of memory-efficient training", "", setting(ladder), "",
        *(["![what each rung holds at its peak](ladder.png)", ""] if plots else []),
        markdown(*table(ladder), NUMBERS), "", explained(ladder), "",
        *(f"- {line}" for line in remarks(ladder)), "",
        "## How it was made", "", *(f"- {key}: {value}" for key, value in made.items()),
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
    peaks.set_title(f"peak of a step, {ladder.shape.parameters / 1e6:.0f}M parameters, GiB (dashed: budget)", size=10)
    millions = [0.0 if row.largest is None else row.largest.parameters / 1e6 for row in ladder.rows]
    for axes in sizes:
        bars = axes.barh(names, millions, color=_BAR)
        axes.bar_label(bars, [f"{value:.0f}" if value else "" for value in millions], padding=3)
        axes.set_title("largest model that trains in the budget, millions", size=10)
    for axes in (peaks, *sizes):
        axes.margins(x=0.15)
        _bare(axes)
    peaks.invert_yaxis()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
