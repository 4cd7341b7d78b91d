"""The ladder as a table, a Markdown page with a plot, and JSON."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowbit.backends.cpu import processor
from lowbit.files import write_atomically, write_json
from lowbit.machine import provenance
from lowbit.plan.ladder.climb import Ladder, Row
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.ladder.shape import textbook
from lowbit.sizes import amount
from lowbit.tables import markdown

__all__ = ["HEAD", "NUMBERS", "write", "written"]

#: The head of the table, whose cells are ``written``; the columns of ``NUMBERS`` are numbers.
HEAD = ("rung", "peak, MiB", "of fp32", "trains", "s a step", "tokens/s", "last loss", "losses", "largest")
NUMBERS = (1, 2, 4, 5, 6)

_ALIKE = {
    ("equal", True): "equal", ("equal", False): "NOT EQUAL", ("close", True): "close", ("close", False): "NOT CLOSE",
}  # fmt: skip
_FITS, _OVER, _INK, _BAR = "#2b8a3e", "#d9480f", "#1f2933", "#2f6fde"


def written(ladder: Ladder) -> list[tuple[str, ...]]:
    """The cells below ``HEAD``."""
    first = ladder.rows[0].whole
    return [_cells(ladder, row, None if first is None else first.peak) for row in ladder.rows]


def _cells(ladder: Ladder, row: Row, base: int | None) -> tuple[str, ...]:
    whole = row.whole
    name = row.rung.name if row.kept else f"{row.rung.name} (left out)"
    limit = "yes" if row.limited.fits else f"no: {row.limited.ran_out}"
    alike = "" if row.alike is None else _ALIKE[row.rung.losses, row.alike]
    if whole is None or whole.seconds is None:
        return (name, "", "", limit, "", "", "", alike, _largest(row))
    return (
        name, f"{whole.peak / 2**20:,.0f}", f"{whole.peak / base:.0%}" if base else "", limit, f"{whole.seconds:.2f}",
        f"{ladder.shape.tokens / whole.seconds:,.0f}", f"{whole.losses[-1]:.5f}", alike, _largest(row),
    )  # fmt: skip


def _largest(row: Row) -> str:
    if row.largest is None:
        return ""
    open_end = "" if row.beyond == row.largest.size + 1 else " or more"
    return f"{row.largest.parameters / 1e6:.0f}M ({row.largest.layers} x {row.largest.width}){open_end}"


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
        "Each rung adds to those above it; one that does not lower the peak is left out of those below it.",
        f"The peak is {LIMITS[ladder.climb.device].unit} in the steps after the first, beyond the {held} that the "
        "process has before the model. The limit is on top of that too.",
        "Where memory runs out, the part of the step and the layer are named, and peak, time and losses are of a run "
        "without a limit.",
        "Losses are compared with those of the rung above: equal in every bit, close (other orders of sums), or of "
        "another arithmetic (no entry).",
        "The largest is the model of the same family that trains under the limit where the next one does not.",
    ]
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
        *(["![peak of each rung, and the largest model that trains](ladder.png)", ""] if plots else []),
        markdown(HEAD, written(ladder), NUMBERS), "", explained(ladder), "",
        *(f"- **{row.rung.name}**: {row.rung.about}" for row in ladder.rows), "",
        "## How it was made", "", *(f"- {key}: {value}" for key, value in made.items()),
    ]  # fmt: skip
    text = "\n".join(lines).encode() + b"\n"
    write_atomically(directory / "ladder.md", lambda file: file.write(text))
    return directory / "ladder.md"


# -- the plot ---------------------------------------------------------------------------------------------------------
def _plot(path: Path, ladder: Ladder) -> None:
    from matplotlib.figure import Figure

    names = [row.rung.name for row in ladder.rows]
    figure = Figure(figsize=(11, 0.5 * len(names) + 1.6), layout="constrained")
    peaks, sizes = figure.subplots(1, 2, sharey=True)
    gib = [0.0 if row.whole is None else row.whole.peak / 2**30 for row in ladder.rows]
    bars = peaks.barh(names, gib, color=[_FITS if row.limited.fits else _OVER for row in ladder.rows])
    peaks.bar_label(bars, [f"{value:.2f}" for value in gib], padding=3)
    peaks.axvline(ladder.climb.budget / 2**30, color=_INK, ls="--")
    peaks.set_title(f"peak of a step, {ladder.shape.parameters / 1e6:.0f}M parameters, GiB (dashed: budget)", size=10)
    millions = [0.0 if row.largest is None else row.largest.parameters / 1e6 for row in ladder.rows]
    bars = sizes.barh(names, millions, color=_BAR)
    sizes.bar_label(bars, [f"{value:.0f}" if value else "" for value in millions], padding=3)
    sizes.set_title("largest model that trains in the budget, millions", size=10)
    for axes in (peaks, sizes):
        axes.margins(x=0.15)
        _bare(axes)
    peaks.invert_yaxis()
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=150))


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
