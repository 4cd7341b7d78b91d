"""Write the documentation's tables from the tables in the code, between ``<!-- table: NAME -->`` and ``<!-- end -->``.

``python docs/generate_tables.py`` rewrites stale tables (``make tables``); ``--check`` names their files and exits 1.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lowbit.evaluate import models
from lowbit.evaluate.cell import FLOATS, Request
from lowbit.evaluate.peers import PEERS
from lowbit.evaluate.report import rows
from lowbit.evaluate.run import Cell, default_of
from lowbit.formats import FORMATS, power_of_two
from lowbit.ops import OPS
from lowbit.recipes import RECIPES
from lowbit.scaling import SCALINGS, SHORT_NAMES, Scaling, find_scaling, scheme
from lowbit.tables import markdown

ROOT = Path(__file__).resolve().parent.parent
FILES = ("README.md", "ARCHITECTURE.md", "docs/formats.md", "bench/results/calibrate/README.md")


def _number(value: float) -> str:
    """Short and exact: a power of two where it is one and far from 1."""
    exponent = power_of_two(value)
    return f"{value:.7g}" if exponent is None or -3 <= exponent <= 6 else f"2^{exponent}"


def formats() -> str:
    special = {"none": "-", "all_ones": "NaN", "ieee": "Inf, NaN"}
    return markdown(
        ("format", "bits", "layout", "bias", "max", "least normal", "least", "Inf, NaN", "source"),
        (
            (
                f"`{f.name}`", f.bits, f.layout, f.bias if f.kind in ("float", "exponent") else "", _number(f.max),
                _number(f.min_normal), _number(f.min_subnormal), special[f.nan], f.source,
            )
            for f in FORMATS.values()
        ),
    )  # fmt: skip


def scalings() -> str:
    def row(pattern: str) -> tuple[object, ...]:
        example = re.sub(r"{\w}", "128", pattern)
        found = find_scaling(example)
        assert isinstance(found, Scaling), example
        block = " x ".join("all" if size is None else str(size) for size in (found.rows, found.cols))
        scale = found.scale_format + (" under one fp32 for the tensor" if found.global_scale else "")
        return f"`{pattern}`", f"`{example}`" if example != pattern else "", block, scale

    return markdown(("scaling", "for instance", "block, rows x cols", "scale"), (row(name) for name in SCALINGS))


def short_names() -> str:
    def bits(text: str) -> str:
        return f"{8 * scheme(text).nbytes((4096, 4096)) / 4096**2:.4g}"

    return markdown(
        ("short name", "means", "bits an element, 4096 x 4096"),
        ((f"`{short}`", f"`{long}`", bits(short)) for short, long in SHORT_NAMES.items()),
    )


def recipes() -> str:
    return markdown(
        ("recipe", "weight", "input", "trains", "what it is"),
        (
            (
                f"`{r.name}`", f"`{r.weight}`", (f"`{r.input}`" if r.input else "-") + (", static" if r.static else ""),
                "yes" if r.trains else "", r.about,
            )
            for r in RECIPES.values()
        ),
    )  # fmt: skip


def ops() -> str:
    return markdown(
        ("op", "returns", "equal to the reference"),
        (
            (
                f"`{o.name}({', '.join(o.args._fields)})`", ", ".join(o.returns),
                "within its bound" if o.tolerance else "in every bit",
            )
            for o in OPS.values()
        ),
    )  # fmt: skip


#: What the README shows of bench/results/cpu.csv: operations, and of what.
SHOWN = (
    ("encode", "fp8_e4m3"), ("decode to bf16", "fp8_e4m3"), ("quantize fp32", "int8:row"), ("quantize fp32", "mxfp8"),
    ("quantize fp32", "nvfp4"), ("dequantize fp32", "nf4"), ("linear 1x4096x4096", "fp32 -> int8:row x int8:row"),
    ("linear 1x4096x4096", "bf16 x int4:group128"), ("linear 1x4096x4096", "bf16 x nf4"),
    ("linear 16x4096x4096", "fp32 -> int8:row x int8:row"), ("linear 16x4096x4096", "fp32 -> int8:row x int4:group128"),
    ("linear 512x4096x4096", "fp32 -> int8:row x int8:row"),
    ("linear 512x4096x4096", "bf16 -> fp8_e4m3:row x fp8_e4m3:row"),
    ("linear 512x4096x4096", "fp32 -> int8:row x int4:group128"), ("adamw nearest", "fp32, moments fp8_e4m3:group256"),
)  # fmt: skip


def speed() -> str:
    with (ROOT / "bench" / "results" / "cpu.csv").open() as file:
        measured = list(csv.DictReader(file))

    def row(op: str, subject: str) -> tuple[object, ...]:
        cases = [case for case in measured if (case["op"], case["subject"]) == (op, subject)]
        ours, theirs = (
            [case for case in cases if case["who"].startswith("lowbit ") == mine] for mine in (True, False)
        )  # fmt: skip
        best = min(ours, key=lambda case: float(case["seconds"]))
        what = f"{op} `{subject}`", f"{1e3 * float(best['seconds']):.3g} ms", f"{float(best['percent']):.0f}%"
        if not theirs:
            return *what, "-", ""
        peer = min(theirs, key=lambda case: float(case["seconds"]))
        times = float(peer["seconds"]) / float(best["seconds"])
        return *what, f"{peer['who']}, {1e3 * float(peer['seconds']):.3g} ms", f"{times:.2g}x"

    head = ("operation", "lowbit", "of the machine's limit", "best of the others", "lowbit is")
    return markdown(head, (row(*shown) for shown in SHOWN))


def _cells(directory: str) -> list[Cell]:
    """The records of ``lowbit evaluate`` in that directory of bench/results, in the order of the recipes."""
    found = []
    for path in (ROOT / "bench" / "results" / directory).glob("**/*.json"):
        record = json.loads(path.read_text())
        key, made_of = record["key"], record["key"]["recipe"]
        told = made_of if isinstance(made_of, dict) else {"name": made_of}
        request = Request(
            path.parent.name, told.get("name") or told["peer"], key["layout"], key["dtype"], None, key["windows"],
            key["limit"], str(path), key, key.get("method"),
        )  # fmt: skip
        found.append(Cell(models.find(path.parent.name), request, record["result"]))
    order = [*FLOATS, *RECIPES]

    def place(cell: Cell) -> tuple[Any, ...]:
        base = cell.request.recipe.split(":")[0]
        return cell.request.recipe in PEERS, order.index(base) if base in order else len(order), cell.request.result

    return sorted(found, key=place)


#: Of the records of ``lowbit evaluate``: the figure of each model that the README shows, and how it is written.
EVALUATED = {
    "smollm2": ("SmolLM2-135M: perplexity", "change", "+.2%"),
    "minilm": ("MiniLM: 1 - cosine", "cosine to fp32", ".2g"),
    "efficientnet-lite0": ("EfficientNet-Lite0: same top class", "same top class as fp32", ".1%"),
}


def evaluate() -> str:
    """Quality by recipe; size and speed of the language model, relative to its bf16 baseline."""
    cells = {(row["model"], row["recipe"], row["layout"]): row for row in rows(_cells("evaluate"))}
    base = cells["smollm2", "bf16", "plain"]

    def figure(name: str, model: str) -> str:
        _, column, style = EVALUATED[model]
        row = cells[model, name, "plain"]
        if row[column] is None:
            return "-"
        value, error = float(row[column]), row[f"{column}, standard error"]
        if column.startswith("cosine"):
            value = 1 - value
        unit = style if style != ".2g" else ".1g"
        return f"{value:{style}}" + (f" ± {float(error):{unit.lstrip('+')}}" if error else "")

    def speed_of(name: str, column: str) -> str:
        rates = [float(row[column]) for layout in ("plain", "packed")
                 if (row := cells.get(("smollm2", name, layout))) and row[column]]  # fmt: skip
        return f"{max(rates) / float(base[column]):.2g}x" if rates else "-"

    names = [recipe for model, recipe, layout in cells if model == "smollm2" and layout == "plain"]
    head = ["recipe", "size", *(title for title, _, _ in EVALUATED.values()), "prompt", "generation"]
    return markdown(
        head,
        (
            (
                f"`{name}`", f"{float(cells['smollm2', name, 'plain']['bytes']) / float(base['bytes']):.0%}",
                *("0" if name == base["recipe"] and model == "smollm2" else figure(name, model) for model in EVALUATED),
                speed_of(name, "units_per_second"), speed_of(name, "generated_per_second"),
            )
            for name in names
            if name != "fp32"
        ),
    )  # fmt: skip


def _calibrated() -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """The records of methods of calibration and of other packages, by recipe and method, then by model."""
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows(_cells("calibrate")):
        if row["recipe"] not in FLOATS and not row["note"]:
            method = row["method"] or ("" if row["recipe"] in PEERS else default_of(row["recipe"]))
            found.setdefault((row["recipe"], method), {})[row["model"]] = row
    return found


def _quality(row: dict[str, Any] | None, model: str, error: bool) -> str:
    """The figure of a model, with its standard error on request."""
    if row is None:
        return ""
    _, column, style = EVALUATED[model]
    value, of = row[column], row[f"{column}, standard error"]
    value = 1 - value if column.startswith("cosine") else value
    return f"{value:{style}}" + (f" ± {of:{'.1g' if style == '.2g' else style.lstrip('+')}}" if error else "")


def methods() -> str:
    """All records, with standard errors and the seconds of calibration."""
    found = _calibrated()
    names = [name for name in EVALUATED if any(name in by for by in found.values())]
    head = ["recipe", "method", *(EVALUATED[name][0] for name in names), *(f"{name}, s" for name in names)]

    def took(row: dict[str, Any] | None) -> str:
        return f"{row['seconds_to_calibrate']:.0f}" if row and row["seconds_to_calibrate"] else ""

    return markdown(
        head,
        (
            (
                f"`{recipe}`", method, *(_quality(by.get(name), name, True) for name in names),
                *(took(by.get(name)) for name in names),
            )
            for (recipe, method), by in found.items()
        ),
    )  # fmt: skip


#: What the README shows of them: recipes, and the method of each column; None: the default one without data.
COMPARED = (
    "int4-weight-only", "int4-weight-only:group32", "nf4", "nvfp4-weight-only", "mxfp4-weight-only",
    "int3-weight-only:group128", "int2-weight-only:group32", "nvfp4", "int8", "int8-group", "fp8",
)  # fmt: skip
SHOWN_METHODS = {
    "nearest": "nearest", "without data": None, "search": "search", "gptq": "gptq", "guided-gptq": "guided-gptq",
    "hadamard, guided-gptq": "hadamard+guided-gptq", "smoothquant, gptq": "smoothquant+gptq",
}  # fmt: skip


def calibrate() -> str:
    """Quality by recipe and method of calibration, of two models."""
    found = _calibrated()

    def shown(recipe: str, method: str | None) -> str:
        by = found.get((recipe, method or default_of(recipe)), {})
        figures = (_quality(by.get(model), model, False) for model in ("smollm2", "minilm"))
        return ", ".join(figure or "-" for figure in figures) if by else ""

    return markdown(
        ["recipe", *SHOWN_METHODS],
        ((f"`{recipe}`", *(shown(recipe, name) for name in SHOWN_METHODS.values())) for recipe in COMPARED),
    )


def confirm() -> str:
    """Quality on the windows of SmolLM2's text that no method was chosen by, which are those after the first twelve."""
    kept = []
    for cell in _cells("confirm"):
        assert cell.result is not None
        values = {name: of[12:] for name, of in cell.result["values"].items()}
        kept.append(replace(cell, result={**cell.result, "values": values}))
    return markdown(
        ("recipe", "method", "windows", "SmolLM2-135M: perplexity"),
        (
            (
                f"`{row['recipe']}`",
                row["method"] or default_of(row["recipe"]),
                row["items"],
                _quality(row, "smollm2", True),
            )
            for row in rows(kept)
            if row["recipe"] not in FLOATS
        ),
    )


def others() -> str:
    """What other packages make of the same models, each at its best on a CPU."""
    return markdown(
        ["package", *(EVALUATED[model][0] for model in ("smollm2", "minilm"))],
        (
            (f"`{recipe}`", *(_quality(by.get(model), model, True) for model in ("smollm2", "minilm")))
            for (recipe, _), by in _calibrated().items()
            if recipe in PEERS
        ),
    )


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (formats, scalings, short_names, recipes, ops, speed, evaluate, calibrate, confirm, others, methods)
}
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """``text`` with every marked table as the code has it. Raises KeyError for a table that is not in ``TABLES``."""
    return _PLACE.sub(lambda place: f"{place[1]}{TABLES[place[2]]()}\n{place[3]}", text)


def main() -> None:
    stale = []
    for name in FILES:
        path = ROOT / name
        text = path.read_text()
        new = filled(text)
        if new != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(new)
    if "--check" in sys.argv and stale:
        raise SystemExit(f"out of date: {', '.join(stale)}; run `make tables`")
    print(f"written: {', '.join(stale)}" if stale else "tables are up to date")


if __name__ == "__main__":
    main()
