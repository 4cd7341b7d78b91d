"""Generates the documentation's tables between ``<!-- table: NAME -->`` and ``<!-- end -->`` from the code.

``python docs/generate_tables.py`` (``make tables``) rewrites stale tables. ``--check`` lists the stale files and exits
with 1.
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

from lowbit.bench import engines as bench_engines
from lowbit.bench import llama7b, loss_tables
from lowbit.distributed.deepspeed.keys import KEYS as DEEPSPEED
from lowbit.evaluate import models
from lowbit.evaluate.cell import FLOATS, Request
from lowbit.evaluate.peers import PEERS
from lowbit.evaluate.report import rows
from lowbit.evaluate.run import Cell, default_of
from lowbit.files import read_records
from lowbit.formats import FORMATS, power_of_two
from lowbit.interop import FORMATS as FILE_FORMATS
from lowbit.interop.compressed_tensors.schemes import group_of
from lowbit.interop.exportable import TARGETS
from lowbit.interop.gguf import ARCHITECTURES
from lowbit.interop.gguf.blocks import block_type
from lowbit.ops import OPS
from lowbit.recipes import OPTIONS, RECIPES
from lowbit.scaling import SCALINGS, SHORT_NAMES, SUPERBLOCK, Scaling, find_scaling, scheme
from lowbit.tables import markdown

sys.path.insert(0, str(Path(__file__).parent))
import module_tables
import training_tables

ROOT = Path(__file__).resolve().parent.parent
FILES = (
    "README.md",
    "ARCHITECTURE.md",
    "docs/7b-on-24gb.md",
    "docs/distributed.md",
    "docs/export.md",
    "docs/formats.md",
    "docs/memory.md",
    "docs/modules.md",
    "docs/numbers.md",
    "docs/optimizers.md",
    "docs/qat.md",
    "bench/results/convergence.md",
    "bench/results/llama7b.md",
    "bench/results/optimizers.md",
    "bench/results/calibrate/README.md",
)


def _number(value: float) -> str:
    """Return a short, exact text: powers of two far from 1 are written as such."""
    exponent = power_of_two(value)
    return f"{value:.7g}" if exponent is None or -3 <= exponent <= 6 else f"2^{exponent}"


def formats() -> str:
    special = {"none": "-", "all_ones": "NaN", "ieee": "Inf, NaN"}
    return markdown(
        ("format", "bits", "layout", "bias", "max", "smallest normal", "smallest", "Inf, NaN", "source"),
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
        scaling = find_scaling(example)
        assert isinstance(scaling, Scaling), example
        block = " x ".join("all" if size is None else str(size) for size in (scaling.rows, scaling.cols))
        span = f"{SUPERBLOCK} columns" if scaling.scale_format in ("uint6", "int8") else "tensor"
        scale = scaling.scale_format + (", also of a minimum" if scaling.minimum else "")
        scale += f", and one global fp32 scale per {span}" if scaling.global_scale else ""
        return f"`{pattern}`", f"`{example}`" if example != pattern else "", block, scale

    return markdown(("scaling", "example", "block, rows x cols", "scale"), (row(name) for name in SCALINGS))


def deepspeed() -> str:
    """Return the keys of DeepSpeed configurations; keys with the same counterpart share a row."""
    keys: dict[str, list[str]] = {}
    for key, row in DEEPSPEED.items():
        keys.setdefault(row.about, []).append(f"`{key}`")
    return markdown(
        ("DeepSpeed", "here"),
        ((", ".join(names).replace("zero_optimization.", ""), about) for about, names in keys.items()),
    )


def short_names() -> str:
    def bits(text: str) -> str:
        return f"{8 * scheme(text).nbytes((4096, 4096)) / 4096**2:.4g}"

    return markdown(
        ("short name", "scheme", "bits per element, 4096 x 4096"),
        ((f"`{short}`", f"`{long}`", bits(short)) for short, long in SHORT_NAMES.items()),
    )


def recipes() -> str:
    return markdown(
        ("recipe", "weight", "input", "trains", "description"),
        (
            (
                f"`{r.name}`", f"`{r.weight}`", (f"`{r.input}`" if r.input else "-") + (", static" if r.static else ""),
                "yes" if r.trains else "", r.about,
            )
            for r in RECIPES.values()
        ),
    )  # fmt: skip


def recipe_options() -> str:
    """Return the options in names of training recipes."""
    return markdown(
        ("option", "values", "description"),
        ((f"`{name}`", row.values.replace("|", "or"), row.about) for name, row in OPTIONS.items()),
    )


def ops() -> str:
    return markdown(
        ("op", "returns", "compared with the reference"),
        (
            (
                f"`{o.name}({', '.join(o.args._fields)})`", ", ".join(o.returns),
                "within its error bound" if o.tolerance else "bit-identical",
            )
            for o in OPS.values()
        ),
    )  # fmt: skip


#: Rows of bench/results/cpu.csv in the README: operation and subject.
SHOWN = (
    ("encode", "fp8_e4m3"), ("quantize fp32", "mxfp8"), ("linear 1x4096x4096", "bf16 x int4:group128"),
    ("linear 16x4096x4096", "fp32 -> int8:row x int8:row"), ("linear 512x4096x4096", "fp32 -> int8:row x int8:row"),
    ("linear 512x4096x4096", "bf16 -> fp8_e4m3:row x fp8_e4m3:row"),
    ("optimizer_step nearest", "adamw fp32, moments fp8_e4m3:group256"),
)  # fmt: skip


def speed() -> str:
    with (ROOT / "bench" / "results" / "cpu.csv").open() as file:
        measured = list(csv.DictReader(file))

    def row(op: str, subject: str) -> tuple[object, ...]:
        cases = [case for case in measured if (case["op"], case["subject"]) == (op, subject)]
        lowbit, peers = (
            [case for case in cases if case["who"].startswith("lowbit ") == is_lowbit] for is_lowbit in (True, False)
        )  # fmt: skip
        best = min(lowbit, key=lambda case: float(case["seconds"]))
        cells = f"{op} `{subject}`", f"{1e3 * float(best['seconds']):.3g} ms", f"{float(best['percent']):.0f}%"
        if not peers:
            return *cells, "-", ""
        peer = min(peers, key=lambda case: float(case["seconds"]))
        speedup = float(peer["seconds"]) / float(best["seconds"])
        return *cells, f"{peer['who']}, {1e3 * float(peer['seconds']):.3g} ms", f"{speedup:.2g}x"

    head = ("operation", "lowbit", "share of the machine's limit", "fastest other library", "speedup")
    return markdown(head, (row(*shown) for shown in SHOWN))


def _cells(directory: str) -> list[Cell]:
    """Return the records of ``lowbit evaluate`` in a directory of bench/results, in the order of the recipes."""
    cells = []
    tables = (ROOT / "bench" / "results" / directory).glob("*.jsonl")
    for table, (name, record) in ((path, row) for path in tables for row in read_records(path).items()):
        key, recipe = record["key"], record["key"]["recipe"]
        recipe = recipe if isinstance(recipe, dict) else {"name": recipe}
        request = Request(
            table.stem, recipe.get("name") or recipe["peer"], key["layout"], key["dtype"], None, key["windows"],
            key["limit"], str(table), name, key, key.get("method"),
        )  # fmt: skip
        cells.append(Cell(models.find(table.stem), request, record["result"]))
    order = [*FLOATS, *RECIPES]

    def rank(cell: Cell) -> tuple[Any, ...]:
        base = cell.request.recipe.split(":")[0]
        return cell.request.recipe in PEERS, order.index(base) if base in order else len(order), cell.request.name

    return sorted(cells, key=rank)


#: Figures of ``lowbit evaluate`` in the README, by model: column title, field of the record, number format.
EVALUATED = {
    "smollm2": ("SmolLM2-135M: perplexity", "change", "+.2%"),
    "minilm": ("MiniLM: 1 - cosine", "cosine to fp32", ".2g"),
    "efficientnet-lite0": ("EfficientNet-Lite0: same top class", "same top class as fp32", ".1%"),
}

#: The recipes of that table.
SHOWN_RECIPES = (
    "bf16", "int8", "int8-group", "int8-weight-only", "int4-weight-only:group32", "nf4", "nvfp4-weight-only", "fp8",
    "mxfp8",
)  # fmt: skip


class _Evaluated:
    """Figures of recipes without calibration data, formatted for the README."""

    def __init__(self) -> None:
        self.cells = {(row["model"], row["recipe"], row["layout"]): row for row in rows(_cells("evaluate"))}
        self.base = self.cells["smollm2", "bf16", "plain"]

    def size(self, recipe: str) -> str:
        return f"{float(self.cells['smollm2', recipe, 'plain']['bytes']) / float(self.base['bytes']):.0%}"

    def quality(self, recipe: str, model: str, error: bool = True) -> str:
        if recipe == self.base["recipe"] and model == "smollm2":
            return "0"
        return _quality(self.cells[model, recipe, "plain"], model, error)

    def speed(self, recipe: str, column: str) -> str:
        """Return the speed of the faster layout relative to bf16."""
        rates = [float(row[column]) for layout in ("plain", "packed")
                 if (row := self.cells.get(("smollm2", recipe, layout))) and row[column]]  # fmt: skip
        return f"{max(rates) / float(self.base[column]):.2g}x" if rates else "-"


def choose() -> str:
    """Return the recommended recipe for each goal, with the recorded figures."""
    plain, calibrated = _Evaluated(), _calibrated()
    small, method = "nvfp4-weight-only", "guided-gptq"
    conv, steps = "int8-static-affine", "fold+nearest+mse+bias"

    def network(recipe: str, method: str) -> str:
        return _quality(calibrated[recipe, method]["efficientnet-lite0"], "efficientnet-lite0", False)

    def language(recipe: str) -> str:
        return f"perplexity {plain.quality(recipe, 'smollm2', False)}"

    return markdown(
        ("goal", "use", "recorded result"),
        (
            (
                "the quality of the original model", "`int8-weight-only`",
                f"{language('int8-weight-only')} at {plain.size('int8-weight-only')} of the size",
            ),
            (
                "speed on a CPU", "`int8-group`, then `lb.prepack_`",
                f"prompts {plain.speed('int8-group', 'units_per_second')} and generation "
                f"{plain.speed('int8-group', 'generated_per_second')} as fast; {language('int8-group')}",
            ),
            (
                "a fast sentence encoder", "`int8`",
                f"1 - cosine to fp32 is {plain.quality('int8', 'minilm', False)} (MiniLM)",
            ),
            (
                "about 4 bits per weight", f"`{small}` with `lb.calibrate`",
                f"{plain.size(small)} of the size; perplexity "
                f"{_quality(calibrated[small, method]['smollm2'], 'smollm2', False)}, without calibration "
                f"{plain.quality(small, 'smollm2', False)}",
            ),
            (
                "a convolutional network",
                f'`{conv}` with `lb.fold_`, `lb.calibrate(..., method=("nearest", "mse"))`, `lb.correct_bias_`',
                f"same top class as fp32 for {network(conv, steps)} of photographs (EfficientNet-Lite0; bf16: "
                f"{plain.quality('bf16', 'efficientnet-lite0', False)})",
            ),
            (
                "FP8, also in training", "`fp8`",
                f"{language('fp8')}; training the demo's GPT in FP8 changes its held-out loss relative to bf16 by "
                f"{loss_tables.in_words(loss_tables.recipe_changes()['fp8'])}",
            ),
        ),
    )  # fmt: skip


def evaluate() -> str:
    """Return quality by recipe, and the language model's size and speed relative to bf16."""
    plain = _Evaluated()
    head = ["recipe", "size", *(title for title, _, _ in EVALUATED.values()), "prompt speed", "generation speed"]
    return markdown(
        head,
        (
            (
                f"`{name}`", plain.size(name), *(plain.quality(name, model) for model in EVALUATED),
                plain.speed(name, "units_per_second"), plain.speed(name, "generated_per_second"),
            )
            for name in SHOWN_RECIPES
        ),
    )  # fmt: skip


#: Rows of EfficientNet-Lite0 with static scales in the README: recipe and method in words, then their recorded names.
SHOWN_NETWORKS = (
    ("`int8-static`", '`("nearest", "mse")`', "int8-static", "fold+nearest+mse"),
    ("`int8-static`", "the same, and `correct_bias_`", "int8-static", "fold+nearest+mse+bias"),
    ("`int8-static-affine`", "the same, and `correct_bias_`", "int8-static-affine", "fold+nearest+mse+bias"),
    (
        "`int8-static-affine:tensor`, one scale per weight tensor",
        "`nearest`",
        "int8-static-affine:tensor",
        "fold+nearest",
    ),
)


def networks() -> str:
    """Return the quality of a convolutional network with static scales, also after quantization-aware training."""
    records, name = _calibrated(), "efficientnet-lite0"

    def row(recipe: str, shown: str, key: str, method: str) -> tuple[str, ...]:
        record = records[key, method][name]
        return recipe, shown, _quality(record, name, True), f"{record['cosine to fp32']:.3f}"

    steps = "60 steps of training ([qat_conv.md](bench/results/qat_conv.md))"
    trained = ("the same", f"`guided-gptq`, `correct_bias_`, then {steps}", *loss_tables.trained_network())
    head = ("recipe", "method", "same top class", "cosine")
    return markdown(head, (*(row(*shown) for shown in SHOWN_NETWORKS), trained))


def _calibrated() -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return the records of calibration methods and other packages, by recipe and method, then by model."""
    records: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows(_cells("calibrate")):
        if row["recipe"] not in FLOATS and not row["note"]:
            method = row["method"] or ("" if row["recipe"] in PEERS else default_of(row["recipe"]))
            records.setdefault((row["recipe"], method), {})[row["model"]] = row
    return records


def _quality(row: dict[str, Any] | None, model: str, error: bool) -> str:
    """Return the figure of a model; with ``error``, also its standard error."""
    if row is None:
        return ""
    _, column, style = EVALUATED[model]
    value, deviation = row[column], row[f"{column}, standard error"]
    value = 1 - value if column.startswith("cosine") else value
    return f"{value:{style}}" + (f" ± {deviation:{'.1g' if style == '.2g' else style.lstrip('+')}}" if error else "")


def methods() -> str:
    """Return all calibration records, with standard errors and the seconds of calibration."""
    records = _calibrated()
    names = [name for name in EVALUATED if any(name in by_model for by_model in records.values())]
    head = ["recipe", "method", *(EVALUATED[name][0] for name in names), *(f"{name}: seconds" for name in names)]

    def seconds(row: dict[str, Any] | None) -> str:
        return f"{row['seconds_to_calibrate']:.0f}" if row and row["seconds_to_calibrate"] else ""

    return markdown(
        head,
        (
            (
                f"`{recipe}`", method, *(_quality(by_model.get(name), name, True) for name in names),
                *(seconds(by_model.get(name)) for name in names),
            )
            for (recipe, method), by_model in records.items()
        ),
    )  # fmt: skip


#: The calibration table of the README: recipes, and the method of each column (None: the default without data).
COMPARED = ("int4-weight-only", "int4-weight-only:group32", "nf4", "nvfp4-weight-only", "int8-group")
SHOWN_METHODS = {
    "nearest": "nearest", "default without data": None, "search": "search", "gptq": "gptq",
    "guided-gptq": "guided-gptq", "hadamard, guided-gptq": "hadamard+guided-gptq",
    "smoothquant, gptq": "smoothquant+gptq",
}  # fmt: skip


def calibrate() -> str:
    """Return the quality of two models by recipe and calibration method."""
    records = _calibrated()

    def shown(recipe: str, method: str | None) -> str:
        by_model = records.get((recipe, method or default_of(recipe)), {})
        figures = (_quality(by_model.get(model), model, False) for model in ("smollm2", "minilm"))
        return ", ".join(figure or "-" for figure in figures) if by_model else ""

    return markdown(
        ["recipe", *SHOWN_METHODS],
        ((f"`{recipe}`", *(shown(recipe, name) for name in SHOWN_METHODS.values())) for recipe in COMPARED),
    )


def confirm() -> str:
    """Return the quality on windows of SmolLM2's text that no method was tuned on: all after the first twelve."""
    held_out = []
    for cell in _cells("confirm"):
        assert cell.result is not None
        values = {name: windows[12:] for name, windows in cell.result["values"].items()}
        held_out.append(replace(cell, result={**cell.result, "values": values}))
    return markdown(
        ("recipe", "method", "windows", "SmolLM2-135M: perplexity"),
        (
            (
                f"`{row['recipe']}`",
                row["method"] or default_of(row["recipe"]),
                row["items"],
                _quality(row, "smollm2", True),
            )
            for row in rows(held_out)
            if row["recipe"] not in FLOATS
        ),
    )


def others() -> str:
    """Return the quality of other packages on the same models, in their best setting on a CPU."""
    both = ("smollm2", "minilm")
    return markdown(
        ["package", *(EVALUATED[model][0] for model in both)],
        (
            (f"`{recipe}`", *(_quality(by_model[model], model, True) for model in both))
            for (recipe, _), by_model in _calibrated().items()
            if recipe in PEERS and by_model.keys() >= set(both)
        ),
    )


def llama7b_memory() -> str:
    """Return the memory of training a 7B model, by training method."""
    return llama7b.table(json.loads((ROOT / "bench" / "results" / "llama7b.json").read_text()))


def _recorded_table(name: str, title: str = "") -> str:
    """Return the table of a page in bench/results, or of its section with this title."""
    page = (ROOT / "bench" / "results" / name).read_text()
    if title:
        page = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return "\n".join(line for line in page.splitlines() if line.startswith("|"))


def calibration_batches() -> str:
    """Return the table of ``lowbit bench calibration-batches``."""
    return _recorded_table("calibration_batches.md")


def exports() -> str:
    """Return the type or format that stores the weights of each recipe, by format of files."""
    rows = []
    for name, recipe in RECIPES.items():
        type_ = block_type(recipe.weight)
        gguf = "" if FILE_FORMATS["gguf"].refuses(recipe) is not None or type_ is None else type_.name
        other = FILE_FORMATS["compressed-tensors"].refuses(recipe)
        operators = (target.row_of(recipe) for target in TARGETS.values())
        marks = ("" if FILE_FORMATS[format].refuses(recipe) else "yes" for format in ("gptq", "modelopt"))
        rows.append(
            (
                f"`{name}`",
                gguf,
                "" if other is not None else group_of(recipe)[0].name,
                *marks,
                *("" if row is None else row.name for row in operators),
            )
        )
    return markdown(
        ("recipe", "GGUF", "compressed-tensors", "GPTQ", "ModelOpt", "ONNX", "OpenVINO", "torch"),
        [row for row in rows if any(row[1:])],
    )


def architectures() -> str:
    """Return the classes of transformers whose models llama.cpp runs."""
    rows = [(f"`{row.model_class}`", f"`{row.name}`") for row in ARCHITECTURES.values()]
    return markdown(("class", "architecture"), rows)


def imports() -> str:
    """Return the formats that lowbit reads and those it writes."""
    rows = [(f"`{row.name}`", row.about, "yes" if row.write else "") for row in FILE_FORMATS.values()]
    return markdown(("format", "", "written by `lb.export`"), rows)


def engines() -> str:
    """Return the tables of ``lowbit bench engines``, with their titles."""
    titles = [section.title for section in bench_engines.SECTIONS]
    tables = [(title, _recorded_table("engines.md", title)) for title in titles]
    return "\n".join(f"\n### {title}\n\n{table}" for title, table in tables if table) + "\n"


def claims() -> str:
    """Return the table of ``lowbit bench claims``."""
    return _recorded_table("claims.md")


TABLES: dict[str, Callable[[], str]] = {
    f.__name__: f
    for f in (
        formats,
        scalings,
        short_names,
        deepspeed,
        recipes,
        recipe_options,
        ops,
        speed,
        choose,
        evaluate,
        calibrate,
        confirm,
        networks,
        others,
        methods,
        calibration_batches,
        claims,
        engines,
        exports,
        imports,
        architectures,
    )
} | {"llama7b": llama7b_memory, **loss_tables.TABLES, **module_tables.TABLES, **training_tables.TABLES}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return ``text`` with every marked table generated again. Raises KeyError for a name that ``TABLES`` lacks."""
    return _TABLE.sub(lambda table: f"{table[1]}{TABLES[table[2]]()}\n{table[3]}", text)


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
