"""``lowbit quantize``: a model's directory in, a smaller one out."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text
from torch import Tensor, nn

from lowbit.calibrate import Calibration, calibrate
from lowbit.cli.budget import CANDIDATES, Budget
from lowbit.cli.console import errors, out, print_json, resumable, size
from lowbit.cli.models import DEFAULT_METHOD, Dtype, cast_, load, methods_in, recipe_in, windows
from lowbit.convert import quantize_
from lowbit.convert.engine import quantized_layers
from lowbit.convert.select import DEFAULT_SKIP, Skip
from lowbit.datafree import DATA_FREE
from lowbit.files import check_regular
from lowbit.memory.rss import available_bytes, peak_bytes, reset_peak
from lowbit.out_of_core import quantize_files
from lowbit.progress import bar
from lowbit.recipes import RECIPES, LayerRecipes, Recipe
from lowbit.report import Report
from lowbit.serialize import huggingface, save_model
from lowbit.serialize.layout import CONFIG, our_config

EPILOG = """
**Examples**

`lowbit quantize out/demo/model int8` — the model that `lowbit train` made

`lowbit quantize SmolLM2-135M int4-weight-only:group32 --out small` — a directory of transformers (config.json and
safetensors)

`lowbit quantize SmolLM2-135M int4-weight-only --calibration found` — after `lowbit calibrate SmolLM2-135M
int4-weight-only --text book.txt --out found`

`lowbit quantize SmolLM2-135M int4-weight-only --text book.txt` — both in one; with --from-disk the model may be larger
than memory

`lowbit quantize SmolLM2-135M --bits 4.5 --text book.txt` — recipes by layer, those that lose the least

Then, in Python: `model = lowbit.load_model("small")`

Recipes: {recipes}

With --text or --calibration: {static}
"""

#: What is copied beside the weights: a tokenizer, configs, a model card, licences.
_COPIED = re.compile(r"[^.].*\.(json|txt|model|jinja|md)|(LICEN[CS]E|NOTICE).*", re.IGNORECASE)
_MOST_COPIED = 64 << 20


def quantize(
    directory: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="A directory of lowbit.save_model or of transformers.")
    ],
    recipe: Annotated[
        str | None,
        typer.Argument(
            help="A recipe, such as int8, int4-weight-only:group32 or mxfp4; with --bits or --size several, with "
            f"commas (none: a layer may stay), by default {','.join(CANDIDATES)}.",
        ),
    ] = None,
    target: Annotated[
        Path | None, typer.Option("--out", help="Where the result goes; MODEL_DIR-RECIPE by default.")
    ] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="Of the weights that are not quantized; auto: as saved, and bf16 where that is fp32.")
    ] = Dtype.auto,
    calibration: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What lowbit calibrate wrote for this model and recipe.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Modules to leave, * for many; lm_head by default.")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help=f"Methods, as of lowbit calibrate; by default {DEFAULT_METHOD}. Without --text, and with --bits or "
            f"--size, one that needs no data: {', '.join(DATA_FREE)}.",
        ),
    ] = None,
    from_disk: Annotated[
        bool | None,
        typer.Option(
            "--from-disk/--in-memory",
            help="Read, quantize and write one weight after the other, or with --text one block; by default where the "
            "weights take more than half of the free memory.",
        ),
    ] = None,
    bits: Annotated[
        float | None, typer.Option(help="Choose a recipe for each layer, of so many bits a weight on average.")
    ] = None,
    total: Annotated[
        str | None, typer.Option("--size", metavar="80MB", help="The same, for so many bytes of the whole model.")
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="UTF-8 text that methods look at, or --bits and --size judge layers by."),
    ] = None,
    count: Annotated[
        int | None, typer.Option("--windows", min=1, help="Windows of the text, at most: 16, or 8 to judge layers.")
    ] = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window.")] = 512,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --bits and --size: draw what each layer loses.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize a saved model, and save the result with its tokenizer and configs.

    Codes are chosen by --method, which looks at what the model computes of --text where there is one, or taken from
    what lowbit calibrate has chosen (--calibration). With --from-disk a run that was stopped goes on when it is given
    again.
    """
    started = time.perf_counter()
    reset_peak()
    budget = Budget(bits, total, plot)
    chosen = _recipe(recipe, budget, calibration, text)
    if calibration is not None and (text is not None or method is not None):
        raise ValueError("--calibration has chosen the codes; leave out --method and --text")
    candidates = budget.check(text, recipe, method) if budget.given else []
    methods = methods_in(method, None if budget.given else text)
    directory = directory.resolve() if directory.name in ("", "..") else directory
    label = budget.label if chosen is None else chosen.name.replace(":", "-")
    target = target or directory.with_name(f"{directory.name}-{label}")
    skipped = DEFAULT_SKIP if skip is None else skip
    if from_disk is None:
        from_disk = chosen is not None and calibration is None and _is_large(directory)
    if from_disk and (chosen is None or calibration is not None):
        raise ValueError("--calibration, --bits and --size need the model in memory; leave out --from-disk")
    if not from_disk and target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another with --out")
    samples = count or (8 if budget.given else 16)
    data = None if text is None else windows(directory, text, samples, length)
    if from_disk:
        assert chosen is not None
        report = _quantize_files(directory, chosen, target, methods, data, dtype, skipped)
    else:
        model = _loaded(directory, dtype)
        recipes: Recipe | LayerRecipes | None = chosen
        if recipes is None:
            assert data is not None
            recipes, data = budget.choose(model, data, candidates, method, skipped), None
        found = _found(model, recipes, data, calibration, methods, skipped)
        with errors.status(Text(f"quantizing with {recipes}"[:100])) as status:
            report = quantize_(model, recipes, found, skip=skipped)
            status.update(Text(f"saving to {target}"))
            target.mkdir(parents=True)  # raises where another run has made it meanwhile
            save_model(model, target)
    _copy_others(directory, target)
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
    """The recipe of all layers; None where a budget chooses one for each."""
    if budget.given:
        if calibration is not None:
            raise ValueError("--calibration is for recipes that are chosen already; leave out --bits and --size")
        return None
    if recipe is None:
        able = ", ".join(name for name, row in RECIPES.items() if row.dynamic)
        with_text = ", ".join(name for name, row in RECIPES.items() if row.static)
        raise ValueError(
            f"give a recipe, one of {able}, with --text FILE one of {with_text}, or a budget: --bits 4.5 --text FILE"
        )
    return recipe_in(recipe, text, calibration is not None)


def _loaded(directory: Path, dtype: Dtype) -> nn.Module:
    """The model, in ``dtype``. Raises ValueError for one that is quantized."""
    with errors.status(Text(f"loading {directory}")):
        model = load(directory)
        already = {layer.recipe.name for layer in quantized_layers(model).values()}
        if already:
            raise ValueError(
                f"{directory} holds a model that is quantized already ({', '.join(sorted(already))}); give the one "
                "that it was made of"
            )
        cast_(model, dtype)
    return model


def _found(
    model: nn.Module,
    chosen: Recipe | LayerRecipes,
    data: list[Tensor] | None,
    calibration: Path | None,
    methods: list[str] | None,
    skip: Skip,
) -> Calibration | None:
    """What says how weights are rounded; None: ``quantize_`` does."""
    if calibration is not None:
        return Calibration.load(calibration)
    if methods is None and data is None:
        return None
    with bar("calibrating") as progress:
        return calibrate(model, chosen, data, methods, skip=skip, progress=progress)


def _is_large(directory: Path) -> bool:
    """Whether the weights in a directory of transformers take more than half of the memory that is free."""
    free = available_bytes()
    if free is None or our_config(directory) is not None or not huggingface.is_directory(directory):
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
    """Quantize without the whole model in memory, with a bar of the blocks and files."""
    with errors.status(Text(f"reading {directory}")):
        model = huggingface.without_weights(directory)
        cast_(model, dtype)
    with resumable(), bar("quantizing") as progress:
        return quantize_files(
            directory, chosen, target, methods, batches=data, model=model, skip=skip, progress=progress
        )


def _copy_others(directory: Path, target: Path) -> None:
    """Copy what belongs to the model and is no weights."""
    for path in sorted(directory.iterdir()):
        index = path.name.endswith(".index.json")  # of weights in several files
        wanted = _COPIED.fullmatch(path.name) and path.name != CONFIG and not index
        if wanted and path.is_file() and not (target / path.name).exists():
            check_regular(path, _MOST_COPIED)
            shutil.copyfile(path, target / path.name)


def _as_json(report: Any, target: Path) -> dict[str, Any]:
    return {
        "recipe": report.recipe, "converted": report.converted, "skipped": report.skipped, "left": report.left,
        "notes": report.notes, "bytes_before": report.bytes_before, "bytes": report.bytes_after, "out": str(target),
    }  # fmt: skip
