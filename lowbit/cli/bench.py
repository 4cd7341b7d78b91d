"""``lowbit bench``: speed and memory of lowbit on this machine, compared with other packages and hardware limits."""

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
    """The suites; each is a module of ``lowbit.bench``."""

    ops = "ops"
    embed = "embed"
    ragged = "ragged"
    products = "products"
    small = "small"
    qat = "qat"
    qat_conv = "qat-conv"
    calibration_batches = "calibration-batches"
    conv = "conv"
    optimizers = "optimizers"
    mixed = "mixed"
    memory_kit = "memory-kit"
    training = "training"
    memory = "memory"
    estimates = "estimates"
    llama7b = "llama7b"
    generation = "generation"
    gguf = "gguf"
    imports = "imports"
    engines = "engines"
    techniques = "techniques"
    handwritten = "handwritten"
    claims = "claims"
    fit = "fit"
    adapters = "adapters"
    plans = "plans"
    finetune = "finetune"
    evidence = "evidence"
    distributed = "distributed"
    gpu_kernels = "kernels"
    gpu_host = "host"


def bench(
    suite: Annotated[
        Suite,
        typer.Argument(
            help="ops: every op. embed: a sentence encoder. ragged: shapes that vectors do not divide. products: other "
            "matmul shapes and formats. small: codecs in the caches, and call overhead. conv: convolutions. "
            "optimizers: optimizer steps. mixed: mixed precision. memory-kit: losses and attention in tiles. "
            "memory, estimates: accuracy of memory estimates, for models and per op. llama7b: memory of training a 7B "
            "model. generation: plans for generation. gguf: exported files in llama.cpp. imports: checkpoints of "
            "other programs. engines: exported models in ONNX Runtime and OpenVINO. techniques: each memory-saving "
            "technique. handwritten: everything on a hand-written transformer. claims: common "
            "statements, measured. fit: plans within a budget. adapters: plans with LoRA adapters. plans: plans for "
            "large models on GPUs that this machine lacks. "
            "finetune: SmolLM2 fine-tuned within memory limits, next to other programs. "
            "training: memory and time per training recipe. "
            "evidence: final losses with paired seeds. distributed: compressed gradients on two "
            "processes. kernels: GPU kernels, compiled without a GPU. host: host time of a layer on a GPU. qat, "
            "qat-conv: quantization-aware training of a GPT and of a CNN. "
            "calibration-batches: static INT8 by the number of calibration batches."
        ),
    ] = Suite.ops,
    only: Annotated[
        str, typer.Option(metavar="REGEX", help="Only matching cases, such as 'encode fp8' or '^scaled_mm 1x'.")
    ] = "",
    directory: Annotated[Path, typer.Option("--out", help="Directory for the results.")] = Path("out/bench"),
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny inputs or few kernels: a smoke test, not a measurement.")
    ] = False,
    device: Annotated[str, typer.Option(help="Suite memory: cpu, cuda, or h200 (estimates alone).")] = "cpu",
    text: Annotated[
        Path | None,
        typer.Option(
            help="Suites generation, gguf, finetune and engines: a UTF-8 text file. Default of engines: the "
            "documentation in this Python.",
            show_default=False,
        ),
    ] = None,
    calibration_text: Annotated[
        Path | None, typer.Option(help="Suite gguf: a UTF-8 text file for calibration.", show_default=False)
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(help="Suite kernels: cache of compiled kernels, by default OUT/kernels.", show_default=False),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Suite kernels: processes; 0 reports only kernels in the cache.")
    ] = 2,
    list_only: Annotated[bool, typer.Option("--list", help="List the cases, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the measurements as JSON.")] = False,
) -> None:
    """Measure lowbit's ops on this CPU, for each format, scheme and instruction set, next to installed peers.

    Cases of a group are interleaved with a measured hardware limit: a copy of equal size, or arithmetic in registers.
    Writes cpu.md, cpu.csv and cpu.png; other suites write files of their own name. A run takes minutes; keep the
    machine idle meanwhile.
    """
    from lowbit.bench import run

    if device not in ("cpu", "cuda", "h200") or (device != "cpu" and suite is not Suite.memory):
        raise ValueError(
            f"--device expects cpu, or for the suite 'memory' cuda or h200, got {device!r} for {suite.value!r}"
        )
    needs_text = suite in (Suite.generation, Suite.gguf, Suite.finetune)
    if text is None if needs_text else text is not None and suite is not Suite.engines:
        raise ValueError(
            f"--text is required by the suites 'generation', 'gguf' and 'finetune', and an option of 'engines', got "
            f"{text} for {suite.value!r}"
        )
    if (calibration_text is None) == (suite is Suite.gguf):
        raise ValueError(f"--calibration-text is required by the suite 'gguf' only, got {calibration_text}")
    if cache is not None and suite is not Suite.gpu_kernels:
        raise ValueError(f"--cache applies only to the suite 'kernels', got {cache} for {suite.value!r}")
    if suite is not Suite.ops:
        selects = suite in (Suite.evidence, Suite.engines, Suite.finetune)
        options: dict[str, Any] = {"only": only} if only and selects else {}
        is_short = suite in (Suite.gpu_kernels, Suite.finetune)
        if (only and not selects) or (quick and not is_short) or list_only or json:
            raise ValueError(
                f"--list and --json apply to the suite 'ops', --quick to 'ops', 'kernels' and 'finetune', --only to "
                f"'ops', 'evidence', 'engines' and 'finetune'; leave them out for {suite.value!r}"
            )
        if suite is Suite.finetune:
            options["quick"] = quick
        if suite is Suite.gpu_kernels:
            options = {"cache_directory": cache or directory / "kernels", "workers": workers, "quick": quick}
        if suite is Suite.memory:
            options["device"] = device
        if text is not None:
            options["text"] = text
        if suite is Suite.gguf:
            options["calibration_text"] = calibration_text
        with errors.status(f"measuring {suite.value}"):
            path = import_module(f"lowbit.bench.{suite.name}").run(directory, **options)
        if suite is Suite.gpu_kernels:  # its table has one line per kernel
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
    """The fastest kernel of lowbit and the fastest peer, per group."""
    cells = []
    for key in dict.fromkeys((row.op, row.subject) for row in rows):
        group = sorted((row for row in rows if (row.op, row.subject) == key), key=lambda row: row.seconds)
        ours = next(row for row in group if row.who.startswith("lowbit"))
        peer = next((row for row in group if not row.who.startswith("lowbit")), None)
        unit = "GFLOP/s" if ours.flops else "GB/s"
        comparison = "-" if peer is None else f"{peer.who} {peer.rate:.3g} {unit}, {ours.rate / peer.rate:.2f}x"
        cells.append((*key, f"{ours.rate:.3g} {unit}", f"{ours.percent:.0f}%", comparison))
    return rich_table(("op", "of", "lowbit", "of limit", "best peer"), cells, numbers=(2, 3))
