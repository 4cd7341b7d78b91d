"""Documentation tables of recorded training runs: losses over all seeds, memory and time.

``docs/generate_tables.py`` writes them, so that all documents quote the same numbers.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lowbit.bench.recorded import Difference, change, losses, losses_table
from lowbit.tables import markdown

__all__ = ["TABLES", "base_changes", "in_words", "optimizer_changes", "recipe_changes", "trained_network"]

RESULTS = Path(__file__).resolve().parent / "results"

#: File of records, and the run to which the other runs are compared.
RECIPES = ("convergence.jsonl", "bf16")
OPTIMIZERS = ("optimizers.jsonl", "torch AdamW, fp32 states")

#: Rows of the README: title, then the recorded run, and the row of training.md with its bytes and time.
SHOWN = {
    "`fp32`": ("fp32", "fp32"), "`fp8`": ("fp8", "fp8"), "`mxfp8`": ("mxfp8", "mxfp8"), "`int8`": ("int8", "int8"),
    "`nvfp4`": ("nvfp4", "nvfp4"), "`nvfp4`, in all blocks": ("nvfp4, all blocks", None),
    "the same with `rule=four-over-six`": ("nvfp4, all blocks, four over six", None),
}  # fmt: skip

#: Rows of docs/optimizers.md.
SHOWN_OPTIMIZERS = {
    "`AdamW8bit`": "AdamW, 8 bits", "`AdamW4bit`": "AdamW, 4 bits",
    '`AdamW8bit`, bf16, `master="residual"`': "AdamW, 8 bits, bf16 weights, residual",
    '`AdamW8bit`, bf16, `master="stochastic"`': "AdamW, 8 bits, bf16 weights, stochastic",
    "`Lion8bit`": "Lion, 8 bits", "`Lion4bit`": "Lion, 4 bits", "`Muon`, `bits=32`": "Muon, 32 bits",
    "`GaLore8bit`, rank a quarter of the width": "GaLore, rank 32, int4 projection, 8 bits",
    "`Apollo8bit`, rank a quarter of the width": "APOLLO, rank 32, 8 bits",
    "`Apollo8bit`, rank 1 (APOLLO-mini)": "APOLLO-mini, 8 bits",
}  # fmt: skip

#: Rows of the README: weights, and learning rate of quantization-aware training in the record and in the table.
SHOWN_QAT = (("int2:group32", "0.001", "1e-3"), ("int4:group32", "0.0001", "1e-4"), ("mxfp4", "0.0001", "1e-4"))

#: Rows of docs/distributed.md.
SHOWN_GRADIENTS = ("int8", "fp8", "int4:group64", "int2:group64")

#: Matches the names of runs that change more than the recipe.
_CHANGED = re.compile(r", (?!all blocks$)")


def _changes(record: tuple[str, str]) -> dict[str, Difference]:
    file, base = record
    runs = losses(RESULTS / file)
    changes = {name: change(row, runs[base]) for name, row in runs.items() if name != base}
    return {name: difference for name, difference in changes.items() if difference is not None}


def recipe_changes() -> dict[str, Difference]:
    """Return the held-out loss of each run of the demo's GPT relative to bf16."""
    return _changes(RECIPES)


def base_changes() -> dict[str, float]:
    """Return the loss of SmolLM2-135M with quantized linear layers relative to bf16, by recipe, as a fraction."""
    lines = (RESULTS / "evaluate" / "smollm2.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["key"].get("layout") == "plain" and "values" in row["result"]]
    means = dict[str, float]()
    for row in rows:
        recipe = row["key"]["recipe"]
        means[recipe if isinstance(recipe, str) else recipe["name"]] = statistics.fmean(row["result"]["values"]["loss"])
    return {name: mean / means["bf16"] - 1 for name, mean in means.items()}


def optimizer_changes() -> dict[str, Difference]:
    """Return the held-out loss of each optimizer run relative to torch's AdamW with fp32 states."""
    return _changes(OPTIMIZERS)


def in_words(difference: Difference) -> str:
    """Return a change with its number of seeds, and whether it is within their noise."""
    noise = ", within their noise" if difference.verdict == "yes" else ""
    return f"{difference} ({difference.count} seeds{noise})" if difference.count > 1 else f"{difference} (one seed)"


def _rows(page: str, marker: str) -> list[list[str]]:
    """Return the cells of the first table after ``marker`` in a page of bench/results, without its head."""
    table = re.search(r"(?:^\|.*\n)+", (RESULTS / page).read_text().partition(marker)[2], re.MULTILINE)
    assert table is not None, f"{page} has no table after {marker!r}"
    lines = table[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("| ").split("|")] for line in lines]


def _section(page: str, marker: str) -> dict[str, list[str]]:
    """Return the rows of a table by their first cell."""
    return {row[0]: row[1:] for row in _rows(page, marker)}


def _part(cell: str) -> str:
    """Return the ratio to bf16 in a cell of training.md, without the mark of a goal."""
    return re.sub(r".*\(|[*)]", "", cell)


def training() -> str:
    """Return training recipes compared with bf16."""
    changes = recipe_changes()
    peaks, times = _section("training.md", "11.5 million parameters"), _section("training.md", "### A larger GPT")

    def row(shown: str, run: str, measured: str | None) -> tuple[str, ...]:
        figures = ("", "", "")
        if measured is not None:
            figures = _part(peaks[measured][1]), _part(peaks[measured][0]), _part(times[measured][1])
        return shown, str(changes[run]), changes[run].verdict, *figures

    head = (
        "recipe", "held-out loss change", "within the noise of seeds", "peak step memory, all three calls",
        "peak step memory, without compressed activations", "step time",
    )  # fmt: skip
    return markdown(head, (row(shown, *names) for shown, names in SHOWN.items()), numbers=(1, 3, 4, 5))


def optimizers() -> str:
    """Return optimizers compared with torch's AdamW in fp32."""
    changes = optimizer_changes()
    head = ("optimizer", "loss change from torch's AdamW in fp32", "within the noise of seeds")
    rows = ((shown, str(changes[run]), changes[run].verdict) for shown, run in SHOWN_OPTIMIZERS.items())
    return markdown(head, rows, numbers=(1,))


def optimizer_runs() -> str:
    """Return all optimizer runs."""
    return _selected(OPTIMIZERS, lambda name: True)


def recipe_runs() -> str:
    """Return the runs that change the recipe only."""
    return _selected(RECIPES, lambda name: not _CHANGED.search(name))


def changed_runs() -> str:
    """Return the runs that change more than the recipe."""
    return _selected(RECIPES, lambda name: name == RECIPES[1] or _CHANGED.search(name) is not None)


def _selected(record: tuple[str, str], wanted: Callable[[str], object]) -> str:
    file, base = record
    return losses_table({name: row for name, row in losses(RESULTS / file).items() if wanted(name)}, base)


def gradients() -> str:
    """Return low-bit gradients, with and without error feedback."""
    recorded = _section("distributed.md", "## Low-bit gradients")

    def row(name: str) -> Iterable[str]:
        plain, with_feedback = recorded[name], recorded[f"{name}, error feedback"]
        return f"`{name}`", plain[2], with_feedback[2], f"{plain[5]}x"

    head = ("gradients", "held-out loss relative to fp32", "with error feedback", "compression relative to bf16")
    return markdown(head, map(row, SHOWN_GRADIENTS), numbers=(1, 2, 3))


def qat() -> str:
    """Return the accuracy recovered by quantization-aware training with learned scales and distillation."""
    method = "QAT, learned scales, distillation"
    recovered = {(row[0], row[2]): row[4] for row in _rows("qat.md", "- date:") if row[1] == method}
    rows = ((f"`{weights}`", shown, recovered[weights, rate]) for weights, rate, shown in SHOWN_QAT)
    return markdown(("weights", "learning rate", "recovered share of the round-to-nearest loss increase"), rows)


def trained_network() -> tuple[str, str]:
    """Return EfficientNet-Lite0's top-class agreement with fp32 and cosine after quantization-aware training."""
    method = "guided-gptq, bias corrected, then QAT"
    cells = next(row for row in _rows("qat_conv.md", "- date:") if row[1] == method)
    return cells[2], f"{float(cells[3].split()[0]):.3f}"


#: The tables by name.
TABLES: Mapping[str, Callable[[], str]] = {
    "training": training, "optimizers": optimizers, "optimizer_runs": optimizer_runs, "recipe_runs": recipe_runs,
    "changed_runs": changed_runs, "gradients": gradients, "qat": qat,
}  # fmt: skip
