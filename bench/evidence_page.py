"""Writes evidence.md: tables of paired loss differences with confidence intervals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lowbit.bench.evidence_cells import ROUNDS, STUDIES, Cell, Study, Variation, cells
from lowbit.bench.recorded import Difference, difference
from lowbit.demo.gpt import GPT
from lowbit.tables import markdown

__all__ = ["write"]

#: Records by digest.
Record = Mapping[str, Mapping[str, Any]]


class Runs:
    """The records of a study, by variation and seed."""

    def __init__(self, study: Study, record: Record) -> None:
        seeds = sorted({seed for part in ROUNDS if part.study is study for seed in part.seeds})
        self.study = study
        self.lines = {
            variation.name: {
                seed: record[digest]
                for seed in seeds
                if (digest := Cell(study, variation, seed).digest) in record
            }
            for variation in study.variations
        }  # fmt: skip

    def pairs(self, name: str, other: str, what: str = "held_out") -> list[tuple[float, float]]:
        """Pairs of losses with the same seed and text."""
        mine, theirs = self.lines[name], self.lines[other]
        return [
            (mine[seed][what], theirs[seed][what])
            for seed in mine.keys() & theirs.keys()
            if what in mine[seed] and what in theirs[seed] and mine[seed]["corpus"] == theirs[seed]["corpus"]
        ]

    def change(self, name: str, other: str, what: str = "held_out") -> Difference | None:
        return difference(self.pairs(name, other, what))


def _shown(change: Difference | None) -> str:
    if change is None:
        return "-"
    return f"{change.mean:+.2f}" + (f" ± {change.error:.2f}" if change.count > 1 else "")


def _interval(change: Difference) -> str:
    return "-" if change.count < 2 else "{:+.2f} to {:+.2f}".format(*change.interval)


def _goal(variation: Variation, change: Difference) -> str:
    """Whether the entire interval is within the goal."""
    if variation.goal is None:
        return ""
    low, high = change.interval
    verdict = "met" if high <= variation.goal else "not met" if low > variation.goal else "open"
    return f"{variation.goal:.1f}: {verdict}"


_HEAD = (
    "run", "seeds", "loss", "change, %", "95%", "goal", "last batches, %", "other text, %", "seeds for ± 0.2",
)  # fmt: skip


def _row(runs: Runs, variation: Variation) -> tuple[object, ...] | None:
    base = runs.study.variations[0].name
    change = runs.change(variation.name, base)
    if change is None:
        return None
    loss = statistics.fmean(loss for loss, _ in runs.pairs(variation.name, base))
    if variation.name == base:
        return variation.name, change.count, f"{loss:.4f}", *[""] * 6
    return (
        variation.name, change.count, f"{loss:.4f}", _shown(change), _interval(change), _goal(variation, change),
        _shown(runs.change(variation.name, base, "last_batches")), _shown(runs.change(variation.name, base, "other")),
        change.needed() if change.count > 1 else "-",
    )  # fmt: skip


def _beside(runs: Runs, variation: Variation) -> tuple[object, ...] | None:
    """A variation compared with the one that differs in one setting, and the sum of its parts, which plans predict."""
    known = {row.name for row in runs.study.variations}
    change = runs.change(variation.name, variation.beside) if variation.beside in known else None
    if change is None or variation.beside == runs.study.variations[0].name:
        return None
    parts = [runs.change(part, runs.study.variations[0].name) for part in variation.parts]
    whole = [part for part in parts if part is not None]
    total = runs.change(variation.name, runs.study.variations[0].name)
    added = f"{sum(part.mean for part in whole):+.2f}" if whole and len(whole) == len(parts) else ""
    return (
        variation.name, variation.beside, change.count, _shown(change), _interval(change),
        added and _shown(total), added,
    )  # fmt: skip


def _section(study: Study, record: Record) -> Iterable[str]:
    runs = Runs(study, record)
    parameters = sum(p.numel() for p in GPT(study.model).parameters())
    tokens = study.steps * study.batch * study.model.context
    yield f"\n## {study.title}\n"
    yield (
        f"{parameters / 1e6:.1f} million parameters, {study.steps:,} steps of {study.batch} x {study.model.context} "
        f"tokens, {tokens / parameters:.2f} tokens per parameter; text: {study.text}.\n"
    )
    rows = [row for variation in study.variations if (row := _row(runs, variation)) is not None]
    yield markdown(_HEAD, rows, numbers=(1, 2, 3, 4, 6, 7, 8)) if rows else "No run yet."
    beside = [row for variation in study.variations if (row := _beside(runs, variation)) is not None]
    if beside:
        head = ("run", "compared with", "seeds", "change, %", "95%", "change from the first, %", "sum of its parts")
        yield "\nCompared with the run that differs in one setting, and the sum of parts that plans predict:\n"
        yield markdown(head, beside, numbers=(2, 3, 4, 5, 6))
    failed = [(name, seed) for name, lines in runs.lines.items() for seed, line in lines.items() if "failed" in line]
    for name, seed in failed:
        yield f"\nFailed: {name}, seed {seed}: {runs.lines[name][seed]['failed']}"


def _listed(lines: Iterable[Mapping[str, Any]], field: str) -> str:
    return "; ".join(sorted({str(line[field]) for line in lines})) or "-"


def write(directory: Path, record: Record) -> Path:
    """Write the page of all records."""
    planned = [cell.digest for cell in cells()]
    done = [record[digest] for digest in planned if digest in record]
    held_out = sorted({line["held_out_tokens"] for line in done if "held_out_tokens" in line})
    text = [
        "# Training losses with error bars\n",
        "- command: `OMP_NUM_THREADS=1 lowbit bench evidence --out bench/results`",
        f"- cells: {len(done)} of {len(planned)}; record: [evidence/](evidence)",
        *(f"- {name}: {_listed(done, field)}" for name, field in _ABOUT.items()),
        f"- held-out tokens of a loss: {', '.join(f'{count:,}' for count in held_out) or '-'}\n",
        "A seed determines the initial weights and all batches, so runs with the same seed are pairs. Changes are "
        "relative to the first row, in percent of its loss on held-out text: the mean over seeds ± its standard error, "
        "and Student's 95% interval. A goal is met if the entire interval is below it, and open if the interval "
        "contains it. "
        "`last batches` compares losses of the last 100 training batches: a run that is better there learns faster, "
        "one that is better on held-out text alone is regularized. `other text`: docstrings of torch. The last column "
        "is the number of seeds for an interval of ± 0.2%. Losses are in the run's own precision, in nats per token.",
    ]
    for study in STUDIES:
        text += _section(study, record)
    path = directory / "evidence.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(text) + "\n")
    return path


_ABOUT = {"machines": "machine", "versions": "versions", "commits": "commit", "products in bf16": "bf16"}
