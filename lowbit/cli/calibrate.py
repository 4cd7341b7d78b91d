"""``lowbit calibrate``: calibrate a saved model on a text, for ``lowbit quantize``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from lowbit.calibrate import METHODS, OBSERVERS, TRANSFORMS
from lowbit.calibrate import calibrate as run
from lowbit.cli.console import errors, out, print_json, resumable, size
from lowbit.cli.models import DEFAULT_METHOD, MODEL, Dtype, load_float, methods_in, recipe_in, windows
from lowbit.convert.select import DEFAULT_SKIP
from lowbit.memory.rss import peak_bytes, reset_peak
from lowbit.progress import bar
from lowbit.recipes import RECIPES

EPILOG = """
**Examples**

`lowbit calibrate SmolLM2-135M int4-weight-only --text book.txt --out found`

`lowbit calibrate SmolLM2-135M int8-static --text book.txt --method smoothquant,search,percentile --out found`

`lowbit calibrate SmolLM2-135M nf4 --method search --out found` — without data

Then: `lowbit quantize SmolLM2-135M int4-weight-only --calibration found`

To continue an interrupted run, repeat the command.

Recipes with static activation scales: {static}. Other recipes: see `lowbit quantize --help`.

Weight methods: {methods}. Transforms, applied before them: {transforms}. Observers for static activation scales:
{observers}.
"""


def calibrate(
    directory: Annotated[Path, typer.Argument(metavar="MODEL", help=f"{MODEL[0].upper()}{MODEL[1:]}.")],
    recipe: Annotated[str, typer.Argument(help="A recipe, such as int4-weight-only:group32 or int8-static.")],
    target: Annotated[Path, typer.Option("--out", metavar="DIR", help="Directory for the result.")],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text, similar to the model's later inputs.")
    ] = None,
    method: Annotated[str | None, typer.Option(metavar="A,B", help=f"Methods; by default {DEFAULT_METHOD}.")] = None,
    count: Annotated[int, typer.Option("--windows", help="Most windows of the text to use.")] = 16,
    length: Annotated[int, typer.Option("--length", help="Tokens per window.")] = 512,
    dtype: Annotated[
        Dtype, typer.Option(help="Dtype of unquantized weights; use the same for lowbit quantize.")
    ] = Dtype.auto,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME", help="Modules not to quantize; * is a wildcard. By default the output layer. Repeatable."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Run a saved model on a text to choose quantized weights and scales, and save them for lowbit quantize."""
    chosen, methods = recipe_in(recipe, text), methods_in(method, text)
    if min(count, length) < 1:
        raise ValueError(f"--windows and --length must be at least 1, got {count} and {length}")
    with errors.status(Text(f"loading {directory}")):
        batches = None if text is None else windows(directory, text, count, length)
        model, note = load_float(directory, dtype)
    reset_peak()
    started = time.perf_counter()
    with resumable(), bar("calibrating") as progress:
        calibration = run(
            model, chosen, batches, methods, skip=DEFAULT_SKIP if skip is None else skip, directory=target,
            progress=progress,
        )  # fmt: skip
    notes = [] if note is None else [note]
    summary = {"out": str(target), "seconds": time.perf_counter() - started, "peak_bytes": peak_bytes()}
    if json:
        print_json({**summary, "notes": notes, "layers": {name: _row(calibration, name) for name in calibration.rows}})
        return
    out.print("\n".join([str(calibration), *notes]), soft_wrap=True)
    out.print(
        f"{summary['seconds']:.1f} s, peak memory {size(peak_bytes())}; saved in {target}. Quantize with: "
        f"lowbit quantize {directory} {recipe} --calibration {target}",
        soft_wrap=True,
    )


calibrate.__doc__ = f"{calibrate.__doc__}\n{EPILOG}".format(
    static=", ".join(name for name, row in RECIPES.items() if row.static),
    methods=", ".join(METHODS),
    transforms=", ".join(TRANSFORMS),
    observers=", ".join(OBSERVERS),
)


def _row(calibration: Any, name: str) -> dict[str, Any]:
    row = calibration.rows[name]
    return {"recipe": row.recipe.name, "method": row.method, "sqnr": row.sqnr, "output_sqnr": row.output_sqnr}
