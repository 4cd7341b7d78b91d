"""``lowbit evaluate``: what quantizing costs real models, and what it saves."""

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

`lowbit evaluate` — the models, and what gets those that are not installed

`lowbit evaluate minilm efficientnet-lite0`

`lowbit evaluate smollm2 --text wiki.test.raw --recipes int8,int4-weight-only`

`lowbit evaluate smollm2 --text wiki.test.raw --recipes int4-weight-only --methods search,gptq,awq+gptq --calibrate
wiki.valid.raw` — methods of calibration beside the default without data

`lowbit evaluate efficientnet-lite0 --recipes int8-static-affine --methods fold+nearest+mse,fold+nearest+mse+bias` —
`fold`: BatchNorm is folded before; `bias`: biases are corrected after

`lowbit evaluate ./my-model --text book.txt` — a directory that transformers loads

`lowbit evaluate ./my-model ./my-model-4.5bit --text book.txt --recipes int8` — beside it a model that lowbit has
quantized already: it is measured as it is, and decoded to fp32 and bf16

A run that was stopped goes on when it is given again: finished cells are read from --out.
"""


def evaluate(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Names of models, or directories of models.")
    ] = None,
    recipes: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Recipes, for models that are not quantized yet; all named ones by default."),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="UTF-8 text; perplexity needs one.")] = None,
    windows: Annotated[int, typer.Option(help="Windows of 512 tokens for perplexity.")] = 12,
    limit: Annotated[int, typer.Option(help="Texts or photographs, at most.")] = 128,
    methods: Annotated[
        str | None, typer.Option(metavar="A,B+C", help="Methods of calibration to compare, plain layers only.")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text that methods look at; not that of --text.")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Windows (16), texts (512) or photographs (128) of it.")] = None,
    peers: Annotated[
        str | None, typer.Option(metavar="A,B", help="Other packages to compare with; `all` for those installed.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="fp32 or bf16, for what recipes leave alone; else the model's own.")
    ] = None,
    directory: Annotated[Path, typer.Option("--out", help="Where the results go.")] = Path("out/evaluate"),
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Measure again what is finished.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure real models with each recipe: quality, bytes, peak memory, time to quantize and speed.

    Writes evaluate.md, evaluate.csv, evaluate.png and a JSON file for each model, recipe and layout.
    """
    from lowbit.evaluate import models, report, run
    from lowbit.evaluate.data import Wanted

    if not names:
        _list(json)
        return
    rows = [models.find(name) for name in names]
    wanted = Wanted(text, windows, limit)
    chosen = None if recipes is None else [name.strip() for name in recipes.split(",") if name.strip()]
    named = () if methods is None else tuple(name.strip() for name in methods.split(",") if name.strip())
    others = _peers(peers)
    if (chosen or named or others) and all(row.held for row in rows):
        raise ValueError(
            f"{', '.join(names)}: quantized already, and measured as saved; leave out --recipes, --methods and "
            "--peers, or name the model that was quantized too"
        )
    cells = [
        cell
        for row in rows
        for cell in run.cells_of(
            row,
            chosen,
            wanted,
            directory,
            dtype,
            run.Methods(named, calibrate, samples or row.samples),
            others,
        )
    ]
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
    """The cells, each measured unless it is finished, with a bar of progress."""
    from lowbit.evaluate import run

    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(None), MofNCompleteColumn(), TimeElapsedColumn(),
        console=errors,
    )  # fmt: skip
    done: list[Any] = []
    with resumable(), bar:
        task = bar.add_task("", total=len(cells))

        def begin(cell: Any) -> None:
            bar.update(task, description=_named(cell))

        for cell in run.run(cells, overwrite, begin):
            done.append(cell)
            bar.update(task, completed=len(done))
            if cell.failed is not None:
                errors.print(f"{_named(cell)} failed:\n{cell.failed}", soft_wrap=True, highlight=False)
    return done


evaluate.__doc__ = f"{evaluate.__doc__}\n{EPILOG}"


def _peers(asked: str | None) -> list[str]:
    """The names of peers; of ``all`` those that are installed."""
    from lowbit.evaluate.peers import PEERS

    if asked != "all":
        return [name.strip() for name in (asked or "").split(",") if name.strip()]
    return [name for name, peer in PEERS.items() if peer.missing() is None]


def _named(cell: Any) -> str:
    return f"{cell.model.name} {cell.request.recipe} {cell.request.method or cell.request.layout}"


def _list(json: bool) -> None:
    """The table of models, and of each whether it is there or how to get it."""
    from lowbit.evaluate.models import MODELS

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
    out.print("\nOr a directory that transformers can load, or that lowbit has quantized.")


def _show(rows: list[dict[str, Any]]) -> None:
    """The table in short: quality, size and speed."""
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
