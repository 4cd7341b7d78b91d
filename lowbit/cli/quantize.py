"""``lowbit quantize``: a model's directory in, a smaller one out."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lowbit.calibrate import Calibration
from lowbit.cli.console import errors, out, print_json
from lowbit.cli.models import Dtype, cast_, load
from lowbit.convert import quantize_
from lowbit.convert.engine import quantized_layers
from lowbit.convert.select import DEFAULT_SKIP
from lowbit.files import check_regular
from lowbit.recipes import RECIPES
from lowbit.recipes import recipe as find_recipe
from lowbit.serialize import save_model
from lowbit.serialize.layout import CONFIG, our_config

EPILOG = """
**Examples**

`lowbit quantize out/demo/model int8` — the model that `lowbit train` made

`lowbit quantize SmolLM2-135M int4-weight-only:group32 --out small` — a directory of transformers (config.json and
safetensors)

`lowbit quantize SmolLM2-135M int4-weight-only --calibration found` — after `lowbit calibrate SmolLM2-135M
int4-weight-only --text book.txt --out found`

Then, in Python: `model = lowbit.load_model("small")`

Recipes: {recipes}
"""

#: What is copied beside the weights: a tokenizer, configs, a model card, licences.
_COPIED = re.compile(r"[^.].*\.(json|txt|model|jinja|md)|(LICEN[CS]E|NOTICE).*", re.IGNORECASE)
_MOST_COPIED = 64 << 20


def quantize(
    directory: Annotated[
        Path, typer.Argument(metavar="MODEL_DIR", help="A directory of lowbit.save_model or of transformers.")
    ],
    recipe: Annotated[str, typer.Argument(help="A recipe, such as int8, int4-weight-only:group32 or mxfp4.")],
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
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize a saved model, and save the result with its tokenizer and configs.

    Weights are rounded to the nearest code, or with --calibration as lowbit calibrate has chosen.
    """
    chosen = find_recipe(recipe)
    directory = directory.resolve() if directory.name in ("", "..") else directory
    target = target or directory.with_name(f"{directory.name}-{chosen.name.replace(':', '-')}")
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another with --out")
    with errors.status(Text(f"loading {directory}")) as status:
        model = load(directory)
        already = {layer.recipe.name for layer in quantized_layers(model).values()}
        if already:
            raise ValueError(
                f"{directory} holds a model that is quantized already ({', '.join(sorted(already))}); give the one "
                "that it was made of"
            )
        cast_(model, dtype)
        status.update(Text(f"quantizing with {chosen.name}"))
        found = None if calibration is None else Calibration.load(calibration)
        report = quantize_(model, chosen, found, skip=DEFAULT_SKIP if skip is None else skip)
        status.update(Text(f"saving to {target}"))
        save_model(model, target)
        _copy_others(directory, target)
    if json:
        print_json(_as_json(report, target))
        return
    out.print(str(report), soft_wrap=True)
    out.print(f"saved in {target}; load it with lowbit.load_model({str(target)!r})", soft_wrap=True)


quantize.__doc__ = f"{quantize.__doc__}\n{EPILOG.format(recipes=', '.join(RECIPES))}"


def _copy_others(directory: Path, target: Path) -> None:
    """Copy what belongs to the model and is no weights."""
    ours = our_config(directory)
    skipped = {CONFIG} if ours is None else {CONFIG, ours[0].name}
    for path in sorted(directory.iterdir()):
        index = path.name.endswith(".index.json")  # of weights in several files
        if _COPIED.fullmatch(path.name) and path.is_file() and path.name not in skipped and not index:
            check_regular(path, _MOST_COPIED)
            shutil.copyfile(path, target / path.name)


def _as_json(report: Any, target: Path) -> dict[str, Any]:
    return {
        "recipe": report.recipe, "converted": report.converted, "skipped": report.skipped, "left": report.left,
        "notes": report.notes, "bytes_before": report.bytes_before, "bytes": report.bytes_after, "out": str(target),
    }  # fmt: skip
