"""``lowbit fit --ladder``: a transformer that does not fit a budget, and what each technique of saving memory buys."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from lowbit.cli.console import errors, out, print_json, resumable
from lowbit.plan.ladder import Climb, climb, report
from lowbit.plan.ladder.limits import LIMITS
from lowbit.progress import bar
from lowbit.sizes import bytes_in
from lowbit.tables import rich_table

EPILOG = """
**Examples**

`lowbit fit --ladder --memory 300MiB --quick` — each technique once, about a minute

`lowbit fit --ladder --memory 2GiB --out out/ladder` — with the largest model of each; it goes on after Ctrl-C

`lowbit fit --ladder --memory 8GiB --device cuda` — on a GPU
"""

_LADDER = "Climb the techniques of memory-efficient training one by one, each in a process with a real limit."


def fit(
    ladder: Annotated[bool, typer.Option("--ladder", help=_LADDER)] = False,
    memory: Annotated[str, typer.Option(help="What a step may take, such as 2GiB.")] = "2GiB",
    directory: Annotated[Path | None, typer.Option("--out", help="Where report and finished runs go.")] = None,
    search: Annotated[int, typer.Option(help="Models tried for the largest of a technique; 0: none.")] = 6,
    quick: Annotated[bool, typer.Option("--quick", help="Two steps each, and no search.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a model fit: what each technique of memory-efficient training buys and costs within a budget."""
    if not ladder:
        raise ValueError("lowbit fit expects --ladder, which is what there is; write lowbit fit --ladder --memory 2GiB")
    if device not in LIMITS:
        raise ValueError(f"--device is one of {', '.join(LIMITS)}, got {device!r}")
    if search < 0:
        raise ValueError(f"--search is a number of models, got {search}; 0 searches for none")
    steps, tries = (2, 0) if quick else (3, search)
    asked = Climb(bytes_in(memory), device, steps, tries, directory)
    with bar("climbing") as progress, resumable():
        climbed = climb(asked, progress=progress)
    path = None if directory is None else report.write(directory, climbed, shlex.join(["lowbit", *sys.argv[1:]]))
    if json:
        print_json(climbed.to_dict())
        return
    out.print(report.setting(climbed), soft_wrap=True)
    out.print(rich_table(*report.table(climbed), report.NUMBERS))
    for line in (*report.remarks(climbed), report.explained(climbed)):
        out.print(line, soft_wrap=True)
    if path is not None:
        errors.print(f"report: {path}", soft_wrap=True)


fit.__doc__ = f"{fit.__doc__}\n{EPILOG}"
