"""Tables of the documents that quote recorded training runs: losses over all seeds, bytes and times beside them.

``docs/generate_tables.py`` writes them, so that a document quotes one number for one claim.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from lowbit.bench.recorded import Difference, change, losses, losses_table
from lowbit.tables import markdown

__all__ = ["TABLES", "in_words", "optimizer_changes", "recipe_changes", "trained_network"]

RESULTS = Path(__file__).resolve().parent / "results"

#: The table of records, and the run that the others are compared with.
RECIPES = ("convergence.jsonl", "bf16")
OPTIMIZERS = ("optimizers.jsonl", "torch AdamW, fp32 states")

#: Rows of the README: what it calls a run of the record, and the row of training.md with its bytes and time.
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
}  # fmt: skip

#: Rows of the README: weights and the learning rate of quantization-aware training.
SHOWN_QAT = (("int2:group32", "0.001", "1e-3"), ("int4:group32", "0.0001", "1e-4"), ("mxfp4", "0.0001", "1e-4"))

#: Rows of docs/distributed.md.
SHOWN_GRADIENTS = ("int8", "fp8", "int4:group64", "int2:group64")

#: What a run was given besides its recipe, as the first words of its name say it; the others are recipes.
_CHANGED = re.compile(r", (?!all blocks$)")


def _changes(record: tuple[str, str]) -> dict[str, Difference]:
    directory, base = record
    found = losses(RESULTS / directory)
    made = {name: change(row, found[base]) for name, row in found.items() if name != base}
    return {name: one for name, one in made.items() if one is not None}


def recipe_changes() -> dict[str, Difference]:
    """By run of the demo's GPT, the change of its held-out loss from bf16's."""
    return _changes(RECIPES)


def optimizer_changes() -> dict[str, Difference]:
    """By run, the change of the held-out loss from that of torch's AdamW with states in fp32."""
    return _changes(OPTIMIZERS)


def in_words(found: Difference) -> str:
    """A change as a phrase that says what it is worth."""
    noise = ", within their noise" if found.verdict == "yes" else ""
    return f"{found} ({found.count} seeds{noise})" if found.count > 1 else f"{found} (one seed)"


def _rows(page: str, marker: str) -> list[list[str]]:
    """The cells of the first table after ``marker`` in a page of the results, without its head."""
    table = re.search(r"(?:^\|.*\n)+", (RESULTS / page).read_text().partition(marker)[2], re.MULTILINE)
    assert table is not None, f"{page} has no table after {marker!r}"
    lines = table[0].splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("| ").split("|")] for line in lines]


def _section(page: str, marker: str) -> dict[str, list[str]]:
    """By its first cell the others of each row."""
    return {row[0]: row[1:] for row in _rows(page, marker)}


def _part(cell: str) -> str:
    """The part of bf16's figure in a cell of training.md, without the mark of a goal."""
    return re.sub(r".*\(|[*)]", "", cell)


def training() -> str:
    """Recipes that train beside bf16."""
    found = recipe_changes()
    peaks, times = _section("training.md", "11.5 million parameters"), _section("training.md", "### A larger GPT")

    def row(shown: str, run: str, measured: str | None) -> tuple[str, ...]:
        figures = ("", "", "")
        if measured is not None:
            figures = _part(peaks[measured][1]), _part(peaks[measured][0]), _part(times[measured][1])
        return shown, str(found[run]), found[run].verdict, *figures

    head = (
        "recipe", "held-out loss", "within the noise of seeds", "peak of a step, all three calls",
        "peak without compressed activations", "time of a step",
    )  # fmt: skip
    return markdown(head, (row(shown, *of) for shown, of in SHOWN.items()), numbers=(1, 3, 4, 5))


def optimizers() -> str:
    """Optimizers beside torch's AdamW in fp32."""
    found = optimizer_changes()
    head = ("", "from torch's AdamW in fp32", "within the noise of seeds")
    rows = ((shown, str(found[run]), found[run].verdict) for shown, run in SHOWN_OPTIMIZERS.items())
    return markdown(head, rows, numbers=(1,))


def optimizer_runs() -> str:
    """All runs of the record of optimizers."""
    return _of_those(OPTIMIZERS, lambda name: True)


def recipe_runs() -> str:
    """All runs of recipes in the record, without those that change something else too."""
    return _of_those(RECIPES, lambda name: not _CHANGED.search(name))


def changed_runs() -> str:
    """The other runs of the same record."""
    return _of_those(RECIPES, lambda name: name == RECIPES[1] or _CHANGED.search(name) is not None)


def _of_those(record: tuple[str, str], wanted: Callable[[str], object]) -> str:
    found = losses(RESULTS / record[0])
    return losses_table({name: row for name, row in found.items() if wanted(name)}, record[1])


def gradients() -> str:
    """Gradients in few bits, each with and without error feedback."""
    recorded = _section("distributed.md", "## Gradients in few bits")

    def row(name: str) -> Iterable[str]:
        plain, fed = recorded[name], recorded[f"{name}, error feedback"]
        return f"`{name}`", plain[2], fed[2], f"{plain[5]} times"

    head = ("gradients", "held-out loss beside fp32", "with error feedback", "bytes less than bf16's")
    return markdown(head, map(row, SHOWN_GRADIENTS), numbers=(1, 2, 3))


def qat() -> str:
    """What quantization-aware training with learned scales and distillation takes back."""
    way = "QAT, learned scales, distillation"
    rates = _rows("qat.md", "- date:")
    recovered = {(row[0], row[2]): row[4] for row in rates if row[1] == way}
    rows = ((f"`{weights}`", shown, recovered[weights, rate]) for weights, rate, shown in SHOWN_QAT)
    return markdown(("weights", "learning rate", "recovered of what round-to-nearest loses"), rows)


def trained_network() -> tuple[str, str]:
    """Of EfficientNet-Lite0 after quantization-aware training: how often its top class is that of fp32, and cosine."""
    way = "guided-gptq, bias corrected, then QAT"
    found = next(row for row in _rows("qat_conv.md", "- date:") if row[1] == way)
    return found[2], f"{float(found[3].split()[0]):.3f}"


#: By the name of its place in a document.
TABLES: Mapping[str, Callable[[], str]] = {
    "training": training, "optimizers": optimizers, "optimizer_runs": optimizer_runs, "recipe_runs": recipe_runs,
    "changed_runs": changed_runs, "gradients": gradients, "qat": qat,
}  # fmt: skip
