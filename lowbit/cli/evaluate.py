"""``lowbit evaluate``: quality, size and speed of real models with each recipe."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from lowbit.cli.console import errors, out, print_json, resumable
from lowbit.files import exclusive
from lowbit.tables import rich_table

EPILOG = """
**Examples**

`lowbit evaluate` — list the models, and how to install missing ones

`lowbit evaluate minilm efficientnet-lite0`

`lowbit evaluate smollm2 --text wiki.test.raw --recipes int8,int4-weight-only`

`lowbit evaluate smollm2 --text wiki.test.raw --recipes int4-weight-only --methods search,gptq,awq+gptq --calibrate
wiki.valid.raw` — compare calibration methods with the default, which needs no data

`lowbit evaluate efficientnet-lite0 --recipes int8-static-affine --methods fold+nearest+mse,fold+nearest+mse+bias` —
`fold`: fold BatchNorm first; `bias`: correct biases at the end

`lowbit evaluate ./my-model --text book.txt` — a Hugging Face model directory

`lowbit evaluate my-model.Q4_K_M.gguf --text book.txt` — a quantized model of another program, measured as it is

`lowbit evaluate ./my-model ./my-model-4.5bit --text book.txt --recipes int8` — with a model that lowbit has already
quantized; it is measured as saved, and decoded to fp32 and bf16

To continue an interrupted run, repeat the command: finished measurements are read from --out.
"""


def evaluate(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL]...", help="Names of models, model directories, or GGUF files."),
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Recipes, for unquantized models; by default all named recipes."),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="UTF-8 text to measure perplexity on.")] = None,
    windows: Annotated[int, typer.Option(help="Windows of 512 tokens for perplexity.")] = 12,
    limit: Annotated[int, typer.Option(help="Most texts or images to use.")] = 128,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B+C", help="Calibration methods to compare, in the plain layout only.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text for calibration; not the file of --text.")
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(help="Calibration samples; by default 16 windows of text, 512 sentences or 128 images."),
    ] = None,
    peers: Annotated[
        str | None, typer.Option(metavar="A,B", help="Other packages to compare with; `all`: all installed ones.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Dtype of unquantized parts: fp32 or bf16; by default as in the model.")
    ] = None,
    directory: Annotated[Path, typer.Option("--out", help="Directory for the results.")] = Path("out/evaluate"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Repeat finished measurements.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure real models with each recipe: quality, bytes, peak memory, time to quantize and speed.

    Writes evaluate.md, evaluate.csv, evaluate.png and one JSON Lines file per model.
    """
    from lowbit.evaluate import models, report, run
    from lowbit.evaluate.data import Wanted

    if not names:
        _list(json)
        return
    rows = [models.find(name) for name in names]
    wanted = Wanted(text, windows, limit)
    recipe_names = None if recipes is None else _split(recipes)
    method_names, peer_names = tuple(_split(methods)), _peers(peers)
    if (recipe_names or method_names or peer_names) and all(row.held for row in rows):
        raise ValueError(
            f"{', '.join(names)}: already quantized, and measured as saved; leave out --recipes, --methods and "
            "--peers, or add the unquantized model"
        )
    cells = [
        cell
        for row in rows
        for cell in run.cells_of(
            row, recipe_names, wanted, directory, dtype,
            run.Methods(method_names, calibrate, samples or row.samples), peer_names,
        )
    ]  # fmt: skip
    for row in rows:
        for warning in row.warnings():
            errors.print(f"warning: {warning}", soft_wrap=True)
    with exclusive(directory, "lowbit evaluate --out"):
        done = _measured(cells, overwrite)
        paths = report.write(directory, done, shlex.join(["lowbit", *sys.argv[1:]]))
    if json:
        print_json(report.as_json(done))
    else:
        _show(report.rows(done))
        out.print(f"results: {', '.join(map(str, paths))}", soft_wrap=True)
    if any(cell.failed is not None for cell in done):
        raise typer.Exit(1)


def _measured(cells: list[Any], overwrite: bool) -> list[Any]:
    """The cells, measured unless they are finished, with a progress bar."""
    from lowbit.evaluate import run

    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(),
        console=errors,
    )  # fmt: skip
    done: list[Any] = []
    with resumable(), bar:
        task = bar.add_task("", total=len(cells))

        def begin(cell: Any) -> None:
            bar.update(task, description=_label(cell))

        for cell in run.run(cells, overwrite, begin):
            done.append(cell)
            bar.update(task, completed=len(done))
            if cell.failed is not None:
                errors.print(f"{_label(cell)} failed:\n{cell.failed}", soft_wrap=True, highlight=False)
    return done


evaluate.__doc__ = f"{evaluate.__doc__}\n{EPILOG}"


def _split(option: str | None) -> list[str]:
    return [name.strip() for name in (option or "").split(",") if name.strip()]


def _peers(option: str | None) -> list[str]:
    """The named peers; ``all`` stands for the installed ones."""
    from lowbit.evaluate.peers import PEERS

    if option != "all":
        return _split(option)
    return [name for name, peer in PEERS.items() if peer.missing() is None]


def _label(cell: Any) -> str:
    return f"{cell.model.name} {cell.request.recipe} {cell.request.method or cell.request.layout}"


def _list(json: bool) -> None:
    """Print the models, and how to install missing ones."""
    from lowbit.evaluate.models import MODELS, PATHS

    entries = []
    for row in MODELS.values():
        try:
            row.location()
            entries.append({"name": row.name, "about": row.about, "installed": True, "get": None})
        except (ImportError, OSError) as missing:
            get = str(missing).rpartition("with: ")[2]
            entries.append({"name": row.name, "about": row.about, "installed": False, "get": get})
    if json:
        print_json(entries)
        return
    for entry in entries:
        out.print(Text.assemble((f"{entry['name']:<19}", "bold"), str(entry["about"])), soft_wrap=True)
        out.print(f"{'':<19}" + ("installed" if entry["installed"] else f"get it with: {entry['get']}"), soft_wrap=True)
    out.print(f"\nOr {PATHS}.", soft_wrap=True)


def _show(rows: list[dict[str, Any]]) -> None:
    """Print a short table: quality, size and speed."""
    cells = []
    for row in rows:
        quality = []
        for title in (name.removesuffix(", standard error") for name in row if name.endswith(", standard error")):
            value, error = row[title], row[f"{title}, standard error"]
            quality.append(f"{title} {value:.5g}" + ("" if error is None else f" ± {error:.2g}"))
        cells.append((
            row["model"], row["recipe"], row["method"] or row["layout"], ", ".join(quality),
            "" if row["bytes"] is None else f"{row['bytes'] / 2**20:.1f}",
            "" if row["units_per_second"] is None else f"{row['units_per_second']:,.4g}", row["note"],
        ))  # fmt: skip
    head = ("model", "recipe", "layout or method", "quality", "MiB", "items/s", "note")
    out.print(rich_table(head, cells, numbers=(4, 5)))
