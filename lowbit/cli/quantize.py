"""``lowbit quantize``: a saved model in, a smaller one out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.console import out, print_json, size
from lowbit.demo import experiment
from lowbit.nn.convert import model_bytes, quantize_
from lowbit.recipes import RECIPES
from lowbit.recipes import recipe as find_recipe

EPILOG = """
**Examples**

`lowbit quantize out/demo/model int8`

`lowbit quantize out/demo/model int4-weight-only:group32 --out small`

Recipes: {recipes}
"""


def quantize(
    directory: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="A model that lowbit train wrote.")],
    recipe: Annotated[str, typer.Argument(help="A recipe, such as int8, int4-weight-only:group32 or mxfp4.")],
    target: Annotated[
        Path | None, typer.Option("--out", help="Where the result goes; MODEL_DIR-RECIPE by default.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Quantize a saved model, without calibration data, and save the result."""
    chosen = find_recipe(recipe)
    target = target or directory.with_name(f"{directory.name}-{chosen.name.replace(':', '-')}")
    if target.exists():
        raise FileExistsError(f"{target} exists; remove it or choose another with --out")
    model, tokenizer = experiment.load(directory)
    model.bfloat16()
    before = model_bytes(model)
    conversion = quantize_(model, chosen)
    experiment.save(model, tokenizer, target)
    result = {
        "recipe": chosen.name, "converted": conversion.converted, "skipped": conversion.skipped,
        "bytes_bf16": before, "bytes": model_bytes(model), "out": str(target),
    }  # fmt: skip
    if json:
        print_json(result)
        return
    out.print(f"{len(conversion.converted)} layers quantized with {chosen.name}: {chosen.about}")
    out.print(f"{size(before)} in bf16 -> {size(model_bytes(model))}, in {target}", soft_wrap=True)


quantize.__doc__ = f"{quantize.__doc__}\n{EPILOG.format(recipes=', '.join(RECIPES))}"
