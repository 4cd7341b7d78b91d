"""``lowbit quantize``: quantize a saved model into a new directory."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from torch import Tensor, nn

from lowbit.calibrate import Calibration, calibrate
from lowbit.cli.budget import CANDIDATES, Budget
from lowbit.cli.console import errors, out, print_json, resumable, size
from lowbit.cli.models import (
    DEFAULT_METHOD,
    MODEL,
    Dtype,
    cast_,
    load_float,
    methods_in,
    recipe_in,
    tokenizer_in,
    windows,
)
from lowbit.convert import quantize_
from lowbit.convert.select import DEFAULT_SKIP, Skip
from lowbit.datafree import DATA_FREE
from lowbit.files import check_regular
from lowbit.interop import format_of
from lowbit.memory.rss import available_bytes, peak_bytes, reset_peak
from lowbit.out_of_core import quantize_files
from lowbit.progress import bar
from lowbit.recipes import RECIPES, LayerRecipes, Recipe
from lowbit.report import Report
from lowbit.serialize import huggingface, save_model
from lowbit.serialize.layout import CONFIG, our_config

EPILOG = """
**Examples**

`lowbit quantize out/demo/model int8` — the model that `lowbit train` saved

`lowbit quantize SmolLM2-135M int4-weight-only:group32 --out small` — a Hugging Face model directory (config.json and
safetensors)

`lowbit quantize SmolLM2.Q8_0.gguf q4_0 --out small` — a GGUF file; quantized weights are decoded first, with a note

`lowbit quantize SmolLM2-135M int4-weight-only --text book.txt` — calibrate on a text and quantize; add --from-disk if
the model is larger than memory

`lowbit quantize SmolLM2-135M int4-weight-only --calibration found` — with the result of `lowbit calibrate SmolLM2-135M
int4-weight-only --text book.txt --out found`

`lowbit quantize SmolLM2-135M --bits 4.5 --text book.txt` — the recipe per layer that loses the least accuracy at 4.5
bits per weight

Then, in Python: `model = lowbit.load_model("small")`

Recipes: {recipes}

Recipes that need --text or --calibration: {static}
"""

#: Files copied along with the weights: tokenizer, configs, model card, licences.
_COPIED = re.compile(r"[^.].*\.(json|txt|model|jinja|md)|(LICEN[CS]E|NOTICE).*", re.IGNORECASE)
_MOST_COPIED = 64 << 20


def quantize(
    directory: Annotated[Path, typer.Argument(metavar="MODEL", help=f"{MODEL[0].upper()}{MODEL[1:]}.")],
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, such as int8, int4-weight-only:group32 or mxfp4. With --bits or --size: the recipes to "
            f"choose from, separated by commas (none: not quantized); by default {','.join(CANDIDATES)}.",
        ),
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--out", help="Directory for the result; by default MODEL-RECIPE.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of unquantized weights. auto: as saved, but bf16 instead of fp32.")
    ] = Dtype.auto,
    calibration: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Output of lowbit calibrate for this model and recipe.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Modules not to quantize; * is a wildcard. By default the output layer. Repeatable."
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=f"Calibration methods; see lowbit calibrate --help. By default {DEFAULT_METHOD}. Without --text, or "
            f"with --bits or --size, one of {', '.join(DATA_FREE)}.",
        ),
    ] = None,
    from_disk: Annotated[
        bool | None,
        typer.Option(
            "--from-disk/--in-memory",
            help="Read, quantize and write one weight at a time (with --text one block). By default if the weights "
            "need more than half of the free memory.",
        ),
    ] = None,
    bits: Annotated[
        float | None, typer.Option(help="Choose a recipe per layer for this average number of bits per weight.")
    ] = None,
    total: Annotated[
        str | None, typer.Option("--size", metavar="80MB", help="Choose a recipe per layer for this model size.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text for calibration, or to compare recipes with --bits and --size."),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--windows", min=1, help="Most windows of the text to use; by default 16, with --bits or --size 8."
        ),
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens per window.")] = 512,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Plot the accuracy loss per layer, with --bits or --size.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize a saved model, and save the result with its tokenizer and configs.

    Weights are quantized by --method. Calibration methods run the model on --text, or use the output of lowbit
    calibrate (--calibration). A run with --from-disk can be interrupted; the same command continues it.
    """
    started = time.perf_counter()
    reset_peak()
    budget = Budget(bits, total, plot)
    chosen = _recipe(recipe, budget, calibration, text)
    if calibration is not None and (text is not None or method is not None):
        raise ValueError("--calibration already holds the quantized values; leave out --method and --text")
    candidates = budget.check(text, recipe, method) if budget.is_set else []
    methods = methods_in(method, None if budget.is_set else text)
    directory = directory.resolve() if directory.name in ("", "..") else directory
    label = budget.label if chosen is None else chosen.name.replace(":", "-")
    target = target or directory.with_name(f"{directory.stem if directory.is_file() else directory.name}-{label}")
    skipped = DEFAULT_SKIP if skip is None else skip
    if from_disk is None:
        from_disk = chosen is not None and calibration is None and _is_large(directory)
    if from_disk and (chosen is None or calibration is not None):
        raise ValueError("--calibration, --bits and --size load the model into memory; leave out --from-disk")
    foreign = format_of(directory)
    if from_disk and foreign is not None:
        raise ValueError(
            f"{directory} is a {foreign.name} model, and --from-disk reads unquantized safetensors files; leave it out"
        )
    if not from_disk and target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another with --out")
    samples = count or (8 if budget.is_set else 16)
    data = None if text is None else windows(directory, text, samples, length)
    if from_disk:
        assert chosen is not None
        report = _quantize_files(directory, chosen, target, methods, data, dtype, skipped)
    else:
        with errors.status(Text(f"loading {directory}")):
            model, note = load_float(directory, dtype)
        recipes: Recipe | LayerRecipes | None = chosen
        if recipes is None:
            assert data is not None
            recipes, data = budget.choose(model, data, candidates, method, skipped), None
        calibrated = _calibration(model, recipes, data, calibration, methods, skipped)
        with errors.status(Text(f"quantizing with {recipes}"[:100])) as status:
            report = quantize_(model, recipes, calibrated, skip=skipped)
            report = report if note is None else replace(report, notes=(*report.notes, note))
            status.update(Text(f"saving to {target}"))
            target.mkdir(parents=True)  # raises if another run has created it meanwhile
            save_model(model, target)
            if foreign is not None:
                model.config.save_pretrained(target)  # type: ignore[union-attr, operator]
    _copy_files(directory, target)
    if json:
        print_json(_as_json(report, target))
        return
    out.print(str(report), soft_wrap=True)
    out.print(
        f"{time.perf_counter() - started:.1f} s, peak memory {size(peak_bytes())}; saved in {target}; load it with "
        f"lowbit.load_model({str(target)!r})",
        soft_wrap=True,
    )


quantize.__doc__ = f"{quantize.__doc__}\n{EPILOG}".format(
    recipes=", ".join(name for name, row in RECIPES.items() if row.dynamic),
    static=", ".join(name for name, row in RECIPES.items() if row.static),
)


def _recipe(recipe: str | None, budget: Budget, calibration: Path | None, text: Path | None) -> Recipe | None:
    """The recipe for all layers; None if a budget chooses one per layer."""
    if budget.is_set:
        if calibration is not None:
            raise ValueError("--calibration is for one recipe that is already chosen; leave out --bits and --size")
        return None
    if recipe is None:
        dynamic = ", ".join(name for name, row in RECIPES.items() if row.dynamic)
        static = ", ".join(name for name, row in RECIPES.items() if row.static)
        raise ValueError(
            f"expected a recipe: one of {dynamic}; with --text FILE one of {static}; or a budget, --bits 4.5 "
            f"--text FILE"
        )
    return recipe_in(recipe, text, calibration is not None)


def _calibration(
    model: nn.Module,
    chosen: Recipe | LayerRecipes,
    data: list[Tensor] | None,
    calibration: Path | None,
    methods: list[str] | None,
    skip: Skip,
) -> Calibration | None:
    """The loaded or computed calibration; None if ``quantize_`` needs none."""
    if calibration is not None:
        return Calibration.load(calibration)
    if methods is None and data is None:
        return None
    with bar("calibrating") as progress:
        return calibrate(model, chosen, data, methods, skip=skip, progress=progress)


def _is_large(directory: Path) -> bool:
    """Whether the weights of a Hugging Face model directory need more than half of the free memory."""
    free = available_bytes()
    if (
        free is None
        or format_of(directory) is not None
        or our_config(directory) is not None
        or not huggingface.is_directory(directory)
    ):
        return False
    return 2 * sum(path.stat().st_size for path in directory.glob("*.safetensors")) > free


def _quantize_files(
    directory: Path,
    chosen: Recipe,
    target: Path,
    methods: list[str] | None,
    data: list[Tensor] | None,
    dtype: Dtype,
    skip: Skip,
) -> Report:
    """Quantize without loading the whole model, with a progress bar."""
    with errors.status(Text(f"reading {directory}")):
        model = huggingface.without_weights(directory)
        cast_(model, dtype)
    with resumable(), bar("quantizing") as progress:
        return quantize_files(
            directory, chosen, target, methods, batches=data, model=model, skip=skip, progress=progress
        )


def _copy_files(directory: Path, target: Path) -> None:
    """Copy tokenizer, configs and documents, but no weights; from a file save its tokenizer."""
    if directory.is_file():
        tokenizer = tokenizer_in(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(target)
        return
    for path in sorted(directory.iterdir()):
        index = path.name.endswith(".index.json")  # of sharded weights
        wanted = _COPIED.fullmatch(path.name) and path.name != CONFIG and not index
        if wanted and path.is_file() and not (target / path.name).exists():
            check_regular(path, _MOST_COPIED)
            shutil.copyfile(path, target / path.name)


def _as_json(report: Any, target: Path) -> dict[str, Any]:
    return {
        "recipe": report.recipe, "converted": report.converted, "skipped": report.skipped, "left": report.left,
        "notes": report.notes, "bytes_before": report.bytes_before, "bytes": report.bytes_after, "out": str(target),
    }  # fmt: skip
