"""``lowbit bench``: every op on this CPU, beside its peers and the machine's limits."""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from lowbit.cli.console import errors, out, print_json
from lowbit.tables import rich_table

if TYPE_CHECKING:
    from rich.table import Table

    from lowbit.bench.report import Row


class Suite(str, Enum):
    """What is measured: each a module of ``lowbit.bench``."""

    ops = "ops"
    embed = "embed"
    ragged = "ragged"
    products = "products"
    small = "small"
    qat = "qat"
    qat_conv = "qat-conv"
    conv = "conv"
    optimizers = "optimizers"
    mixed = "mixed"
    memory_kit = "memory-kit"
    training = "training"
    memory = "memory"
    estimates = "estimates"
    llama7b = "llama7b"
    generation = "generation"
    techniques = "techniques"
    fit = "fit"
    evidence = "evidence"
    distributed = "distributed"
    gpu_kernels = "kernels"
    gpu_host = "host"


def bench(
    suite: Annotated[
        Suite,
        typer.Argument(
            help="Every op; a sentence encoder end to end; shapes that no vector divides; products of other shapes and "
            "formats; codecs in the caches and what a call costs; convolutions; optimizers; mixed precision; "
            "losses and attention without their largest tensor; what an estimate of memory is worth, "
            "on real models and op by op; the memory of training a 7B model, by the way to train it; plans for "
            "generation with a real model; each technique of saving memory; plans within a budget; bytes and time of "
            "training in each recipe; where that ends, with paired seeds; gradients in few bits on two processes; the "
            "kernels that would serve a GPU, compiled without one; how long the host takes for a layer there; "
            "or what quantization-aware training brings back, of the demo's GPT and of a convolutional network."
        ),
    ] = Suite.ops,
    only: Annotated[
        str, typer.Option(metavar="REGEX", help="Only what matches, as 'encode fp8' or '^scaled_mm 1x'.")
    ] = "",
    directory: Annotated[Path, typer.Option("--out", help="Where the results go.")] = Path("out/bench"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny inputs, or few kernels: shows that all runs, measures nothing.")
    ] = False,
    device: Annotated[str, typer.Option(help="Of the suite 'memory': cpu or cuda.")] = "cpu",
    text: Annotated[
        Path | None, typer.Option(help="Of the suite 'generation': a file of UTF-8 text.", show_default=False)
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Of 'kernels': a folder of what was compiled, by default OUT/kernels.", show_default=False),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Of 'kernels': processes; with 0 what the cache has is written.")
    ] = 2,
    list_only: Annotated[bool, typer.Option("--list", help="Print what would be measured, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Measure every op, format and scheme on this CPU, on each instruction set, beside peers that are installed.

    All cases of a group take turns with the machine's limit (a copy of as many bytes; arithmetic in registers). Writes
    cpu.md, cpu.csv and cpu.png; other suites files of their names. Minutes in all; leave the machine alone meanwhile.
    """
    from lowbit.bench import run

    if device not in ("cpu", "cuda") or (device != "cpu" and suite is not Suite.memory):
        raise ValueError(f"--device is cpu or cuda, and of the suite 'memory', got {device!r} for {suite.value!r}")
    if (text is None) == (suite is Suite.generation):
        raise ValueError(f"--text is of the suite 'generation' and needed there, got {text} for {suite.value!r}")
    if cache is not None and suite is not Suite.gpu_kernels:
        raise ValueError(f"--cache is of the suite 'kernels', got {cache} for {suite.value!r}")
    if suite is not Suite.ops:
        chosen: dict[str, Any] = {"only": only} if only and suite is Suite.evidence else {}
        if (only and not chosen) or (quick and suite is not Suite.gpu_kernels) or list_only or json:
            raise ValueError(
                f"--list and --json are of the suite 'ops', --quick of it and of 'kernels', and --only of it and of "
                f"'evidence', not of {suite.value!r}"
            )
        if suite is Suite.gpu_kernels:
            chosen = {"cache_directory": cache or directory / "kernels", "workers": workers, "quick": quick}
        if suite is Suite.memory:
            chosen["device"] = device
        if suite is Suite.generation:
            chosen["text"] = text
        with errors.status(f"measuring {suite.value}"):
            path = import_module(f"lowbit.bench.{suite.name}").run(directory, **chosen)
        if suite is Suite.gpu_kernels:  # as many lines as there are rows
            out.print(f"results: {path}", soft_wrap=True)
            return
        out.print(path.read_text(), markup=False, soft_wrap=True)
        return
    items = run.select(only, quick)
    if list_only:
        for item in items:
            out.print(f"{item.label} {item.subject}", soft_wrap=True)
        return
    bar = Progress(
        TextColumn("{task.description}", markup=False), BarColumn(None), MofNCompleteColumn(),
        TimeRemainingColumn(compact=True), console=errors,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(items))

        def begin(item: Any) -> None:
            bar.update(task, description=f"{item.label} {item.subject}", completed=items.index(item))

        path, rows = run.run(items, directory, quick, begin)
        bar.update(task, completed=len(items))
    if json:
        print_json([{**asdict(row), "rate": row.rate, "percent": row.percent} for row in rows])
        return
    out.print(_summary(rows))
    out.print(f"results: {path}", soft_wrap=True)


def _summary(rows: list[Row]) -> Table:
    """The best of lowbit and the best peer of each group."""
    cells = []
    for key in dict.fromkeys((row.op, row.subject) for row in rows):
        mine = sorted((row for row in rows if (row.op, row.subject) == key), key=lambda row: row.seconds)
        ours = next(row for row in mine if row.who.startswith("lowbit"))
        peer = next((row for row in mine if not row.who.startswith("lowbit")), None)
        unit = "GFLOP/s" if ours.flops else "GB/s"
        beside = "-" if peer is None else f"{peer.who} {peer.rate:.3g} {unit}, {ours.rate / peer.rate:.2f}x"
        cells.append((*key, f"{ours.rate:.3g} {unit}", f"{ours.percent:.0f}%", beside))
    return rich_table(("op", "of", "lowbit", "of limit", "best peer"), cells, numbers=(2, 3))
