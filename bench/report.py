"""Writes results as Markdown, CSV and a picture, with machine, versions and commit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from lowbit.bench.goals import goal
from lowbit.bench.timing import Group
from lowbit.tables import csv_text, markdown


@dataclass(frozen=True)
class Row:
    """A case of a group, with the group's limit."""

    section: str
    op: str
    subject: str
    who: str
    seconds: float
    bytes: int
    flops: int
    limit: str
    limit_seconds: float

    @property
    def rate(self) -> float:
        """GFLOP/s if there are any, else GB/s."""
        return (self.flops or self.bytes) / self.seconds / 1e9

    @property
    def limit_rate(self) -> float:
        return (self.flops or self.bytes) / self.limit_seconds / 1e9

    @property
    def percent(self) -> float:
        return 100 * self.limit_seconds / self.seconds


def rows_of(group: Group, seconds: dict[str, float]) -> list[Row]:
    limit = max((case.who for case in group.limits), key=lambda who: seconds[who])
    return [
        Row(
            group.section, group.op, group.subject, case.who, seconds[case.who], group.bytes, group.flops,
            limit, seconds[limit],
        )
        for case in group.cases
    ]  # fmt: skip


def write(directory: Path, name: str, rows: list[Row], shapes: str, about: dict[str, str], quick: bool) -> Path:
    """Write ``NAME.md``, ``NAME.csv`` and (if matplotlib is installed) ``NAME.png``; return the Markdown path."""
    directory.mkdir(parents=True, exist_ok=True)
    table = ({**asdict(row), "rate": f"{row.rate:.4g}", "percent": f"{row.percent:.4g}"} for row in rows)
    (directory / f"{name}.csv").write_text(csv_text(table))
    suite = "" if name == "cpu" else f" {name}"
    picture = plot(rows, directory / f"{name}.png")
    path = directory / f"{name}.md"
    path.write_text("\n".join(_text(rows, shapes, about, quick, f"{name}.png" if picture else "", suite)) + "\n")
    return path


# -- Markdown ----------------------------------------------------------------------------------------------------------
def _text(rows: list[Row], shapes: str, about: dict[str, str], quick: bool, picture: str, suite: str) -> Iterable[str]:
    yield "# CPU benchmark\n"
    if quick:
        yield "**A quick run on tiny inputs, which shows that everything runs. Its figures mean nothing.**\n"
    yield f"Written by `lowbit bench{suite}`. A row's entries, its limit among them, took turns in one loop; medians.\n"
    for key, value in about.items():
        yield f"- {key}: {value}"
    yield (
        f"\n{shapes}, outputs preallocated. **GB/s** counts the bytes that must move at "
        "least (input read once, output written once). The limit is `copy_` of as many bytes, half read "
        "and half written. Products count 2mnk operations; their limit is the slower of reading their operands from "
        "memory and of as many operations in registers (int8 for integer pairs, else bf16 where the processor has it "
        "and the operands are exact in it, else fp32). Operands come from memory, not from a cache. In parentheses: "
        "percent of the limit; `goal` is what lowbit's best should reach of it. `-`: not offered, or not installed. "
        "`medium`: with leave to round fp32 operands to bf16, which torch takes where the processor has bf16 products."
    )
    if picture:
        yield f"\n![percent of the limit, by operation]({picture})"
    for op in dict.fromkeys(row.op for row in rows):
        cases = [row for row in rows if row.op == op]
        who = _in_order(cases)
        yield f"\n## {op}, {'GFLOP/s' if cases[0].flops else 'GB/s'}\n"
        subjects = dict.fromkeys(row.subject for row in cases)
        cells = (_cells([row for row in cases if row.subject == subject], who) for subject in subjects)
        yield markdown(["", "limit", "goal", *who], cells, numbers=range(1, len(who) + 3))


def _cells(cases: list[Row], who: list[str]) -> list[str]:
    """The cells of a group: the limit, the goal, and the rate of each of ``who``."""
    first, by = cases[0], {row.who: row for row in cases}
    rates = [f"{row.rate:.3g} ({row.percent:.0f}%)" if (row := by.get(name)) else "-" for name in who]
    limit = f"{first.limit_rate:.3g}" + (f" {first.limit.removesuffix(' peak')}" if first.flops else "")
    aim = goal(first.op, first.subject)
    return [f"`{first.subject}`", limit, "-" if aim is None else f"{aim}%", *rates]


def _in_order(rows: list[Row]) -> list[str]:
    """Contenders: lowbit's instruction sets, best first, then peers."""
    names = list(dict.fromkeys(row.who for row in rows))
    ours = [name for name in names if name.startswith("lowbit")]
    return [*reversed(ours), *(name for name in names if name not in ours)]


# -- picture -----------------------------------------------------------------------------------------------------------
_COLOURS = {
    "lowbit avx512": "#1b6ca8", "lowbit neon": "#1b6ca8", "lowbit avx2": "#67a9cf", "lowbit scalar": "#c6dbef",
    "lowbit": "#1b6ca8", "lowbit reference": "#c6dbef", "torch": "#d95f02", "torch fp32": "#fdae61",
    "torch bf16": "#e6550d", "torch._scaled_mm": "#d95f02", "ml_dtypes": "#7570b3", "torchao": "#1b9e77",
    "torchao, eager": "#99d8c9", "bitsandbytes": "#e7298a",
}  # fmt: skip


def plot(rows: list[Row], path: Path) -> bool:
    """Plot percent of the limit: a panel per section, a line per group, a dot per case. False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    sections = list(dict.fromkeys(row.section for row in rows))
    ops = list(dict.fromkeys(row.op for row in rows))
    labels = {
        s: sorted(
            dict.fromkeys((r.op, r.subject) for r in rows if r.section == s), key=lambda label: ops.index(label[0])
        )
        for s in sections
    }
    heights = [len(labels[s]) + 3 for s in sections]
    figure, axes = pyplot.subplots(
        len(sections),
        1,
        figsize=(11, 0.2 * sum(heights) + 1),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for axis, section in zip(axes[:, 0], sections, strict=True):
        places = {label: -index for index, label in enumerate(labels[section])}
        mine = [row for row in rows if row.section == section]
        for who in reversed(_in_order(mine)):
            dots = [(row.percent, places[row.op, row.subject]) for row in mine if row.who == who]
            axis.scatter(*zip(*dots, strict=True), s=28, label=who, color=_COLOURS.get(who, "#666666"), zorder=3)
        axis.axvline(100, color="black", linewidth=1)
        axis.set(xscale="log", title=section, ylim=(-len(places) + 0.3, 0.7))
        axis.set_yticks(list(places.values()), [f"{op}  {subject}" for op, subject in places], fontsize=7)
        axis.xaxis.set_major_formatter("{x:g}%")
        axis.grid(axis="x", alpha=0.4)
        axis.grid(axis="y", alpha=0.2)
        axis.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    figure.suptitle("Percent of the machine's limit (a copy of as many bytes; torch's own matrix product)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True
