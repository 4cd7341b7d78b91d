"""``lowbit train``: the demo; trains a small transformer on a text and quantizes it with every recipe."""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from lowbit.cli.console import errors, out, print_json
from lowbit.cli.processes import lock, make_writable, needs_torchrun, process_group
from lowbit.cli.tune import ADAPTERS, HELD_OUT, MODEL_HELP, OF_MODEL, TEXT, refuse_options, set_options, tune_command
from lowbit.combinations import refusal
from lowbit.demo import experiment, planned, report
from lowbit.demo.config import OUTSIDE, TrainConfig
from lowbit.demo.data import Corpus
from lowbit.demo.explain import HEAD, SAYS, Held, held, one_by_one, written
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import PROFILED, Trainer
from lowbit.dist_utils import launched
from lowbit.distributed import torchrun
from lowbit.distributed.torchrun import STRATEGIES
from lowbit.interrupts import Interrupted
from lowbit.machine import float_precision
from lowbit.plan import TrainingPlan
from lowbit.plan.fitting.choices import words
from lowbit.progress import bar as planning_bar
from lowbit.sizes import amount, share_changed
from lowbit.tables import rich_table
from lowbit.train.mixed import PARTS

EPILOG = """
**Examples**

`lowbit train` — the whole demo, about two minutes on two cores; the report is out/demo/report.md

`lowbit train --data book.txt --steps 2000` — on your own text

`lowbit train --optimizer lion4bit` — 4-bit optimizer states; also adamw8bit, sgd8bit, muon8bit and so on

`lowbit train --precision fp8-block --recipe mxfp4 --recipe nf4` — other number formats

`lowbit train --explain --precision fp16` — print the dtype of each part and the bytes of a step, without training

`lowbit train --precision bf16 --precision nvfp4 --tail 0.1` — train in 4 bits, the last tenth of the steps in bf16

`lowbit train --memory 40MiB` — within a memory budget; also a share of plain training, such as 60%

`lowbit train --watch 50` — overflow, underflow, saturation and SQNR per layer and operand, every 50 steps

`torchrun --nproc-per-node 2 -m lowbit train --strategy zero1` — on two processes that share each batch

`lowbit train SmolLM2-135M --text notes.txt --memory 2GiB` — fine-tune a model within a memory budget

`lowbit train SmolLM2-135M --text chats.jsonl --adapters 16` — LoRA adapters, on the model as it is

`torchrun --nproc-per-node 2 -m lowbit train SmolLM2-135M --text notes.txt --strategy zero3` — on two processes

`lowbit train --resume` — continue after Ctrl-C; the result is bit-identical to an uninterrupted run
"""

_MODEL, _TRAIN = GPTConfig(), TrainConfig()
_PRECISION = (
    "fp32, bf16, fp16 or a training recipe. Repeatable: one run each. By default fp8, and bf16 (fp32 on CPUs without "
    "bf16). With MODEL: one, by default fp32, with --memory the choice of the plan."
)
_OPTIMIZER = (
    "Optimizer, such as adamw8bit or lion4bit. By default adamw for fp32, bf16 and fp16, adamw8bit for recipes."
)
_ACTIVATIONS = "In runs with recipes, save the inputs of norms and activation functions for backward in FP8."
_CHECKPOINTING = "Activation checkpointing: save only each block's input and recompute the rest in backward."
_TAIL = "Fraction of the steps, at the end, that runs with recipes compute in bf16 or fp32, such as 0.1."
_PROFILE = "Profile the memory of one step per run: a table, memory.json and memory.png."
_MEMORY = (
    "Memory budget for a training step, such as 1GiB or 60% of plain training. Each run then follows a plan that "
    "chooses checkpointing, micro-batches, bits of the optimizer states (unless --optimizer is set) and offload. With "
    "MODEL on several processes: of each process."
)
_STRATEGY = (
    f"Sharding strategy of the processes started by torchrun: {', '.join(STRATEGIES)}. By default ddp, with MODEL and "
    "--memory the choice of the plan."
)
_TIMEOUT = "Seconds that a process waits for the other processes before the run fails."
_WATCH = "Every N steps, record the quantization error of each layer and operand; 0: never."


def train(
    context: typer.Context,
    model: Annotated[Path | None, typer.Argument(help=MODEL_HELP, show_default=False)] = None,
    text: Annotated[Path | None, typer.Option(help=TEXT)] = None,
    held_out: Annotated[Path | None, typer.Option(help=HELD_OUT)] = None,
    adapters: Annotated[int, typer.Option(metavar="RANK", help=ADAPTERS)] = 0,
    directory: Annotated[
        Path, typer.Option("--out", help="Output directory.", show_default="out/demo, with MODEL out/train")
    ] = Path("out/demo"),
    data: Annotated[
        Path | None, typer.Option(help="UTF-8 text to train on; by default Python's documentation.")
    ] = None,
    precision: Annotated[list[str] | None, typer.Option(help=_PRECISION)] = None,
    optimizer: Annotated[str | None, typer.Option(help=_OPTIMIZER)] = None,
    recipe: Annotated[
        list[str] | None, typer.Option(help="Recipe to quantize with. Repeatable; by default all.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps per run.")] = _TRAIN.steps,
    batch: Annotated[int, typer.Option(help="Sequences per step.")] = _TRAIN.batch,
    length: Annotated[int, typer.Option("--context", help="Tokens per sequence.")] = _MODEL.context,
    lr: Annotated[float, typer.Option(help="Peak learning rate.")] = _TRAIN.lr,
    seed: Annotated[int, typer.Option(help="Seed of weights and batches.")] = _TRAIN.seed,
    layers: Annotated[int, typer.Option(help="Number of blocks.")] = _MODEL.layers,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = _MODEL.dim,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = _MODEL.heads,
    hidden: Annotated[int, typer.Option(help="Width of the feed-forward layer.")] = _MODEL.hidden,
    vocab: Annotated[int, typer.Option(help="Vocabulary size; 256: bytes.")] = _MODEL.vocab,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = _TRAIN.save_every,
    eval_every: Annotated[int, typer.Option(help="Steps between held-out evaluations.")] = _TRAIN.eval_every,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help=_CHECKPOINTING)] = False,
    compress_activations: Annotated[bool, typer.Option(help=_ACTIVATIONS)] = True,
    tail: Annotated[float, typer.Option(help=_TAIL)] = _TRAIN.tail,
    watch: Annotated[int, typer.Option(metavar="N", help=_WATCH)] = 0,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help=_MEMORY)] = None,
    profile_memory: Annotated[bool, typer.Option("--profile-memory", help=_PROFILE)] = False,
    strategy: Annotated[str | None, typer.Option(help=_STRATEGY)] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help=_TIMEOUT)] = torchrun.TIMEOUT,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the run in --out.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print dtypes and memory per run, then stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report's numbers as JSON.")] = False,
) -> None:
    """Train a small GPT in bf16 (or fp32) and in FP8 on English text, quantize it with every recipe, and report.

    Ctrl-C finishes the step and saves; --resume continues, bit-identical to an uninterrupted run. Start it with
    torchrun to train on several processes.
    """
    if model is None:
        refuse_options(context, OF_MODEL, "applies to lowbit train MODEL; the demo's text is --data")
    if strategy is not None and not launched():
        raise ValueError(needs_torchrun(f"--strategy {strategy}"))
    if model is not None:
        device = torchrun.device()
        with process_group(timeout, device) if launched() else nullcontext():
            tune_command(context, model, text, held_out, device)
        return
    if strategy is None and launched() and int(os.environ["WORLD_SIZE"]) > 1:
        strategy = "ddp"
    with process_group(timeout, torch.device("cpu")) if launched() else nullcontext():
        precisions = tuple(dict.fromkeys(precision or (float_precision(), "fp8")))
        outside = next((name for name in precisions if name in OUTSIDE), float_precision())
        settings = experiment.RunSettings(
            model=GPTConfig(vocab=vocab, context=length, layers=layers, heads=heads, dim=dim, hidden=hidden),
            train=TrainConfig(
                outside=outside, steps=steps, batch=batch, context=length, lr=lr, seed=seed,
                warmup=max(1, steps // 10), save_every=save_every, eval_every=eval_every,
                checkpointing=checkpointing, compress_activations=compress_activations, tail=tail,
            ),
            precisions=precisions,
            recipes=tuple(recipe if recipe is not None else experiment.INFERENCE_RECIPES),
            optimizer=optimizer,
            data=str(data.resolve()) if data else None,
            watch=watch,
            profile_memory=profile_memory,
            memory=memory,
            strategy=None if explain else strategy,
        )  # fmt: skip
        if explain and memory is not None:
            raise ValueError(refusal("explain memory", "train"))
        if explain:
            _explain(settings, json)
            return
        if resume:
            settings = _resumed(context, settings, directory)
        _demo(settings, directory, resume, overwrite, json)


train.__doc__ = f"{train.__doc__}\n{EPILOG}"


def _demo(settings: experiment.RunSettings, directory: Path, resume: bool, overwrite: bool, json: bool) -> None:
    """Train, save and report. Only the first process writes to ``directory``."""
    warning = report.without_plots()
    if warning:
        errors.print(warning, soft_wrap=True)
    corpus = settings.corpus()
    if not resume:
        experiment.check(settings, corpus, directory)
    with ExitStack() as locks:
        torchrun.first(lambda: lock(directory, locks), "whether another run has the directory")
        _run_locked(settings, corpus, directory, resume, overwrite, json)


def _run_locked(
    settings: experiment.RunSettings, corpus: Corpus, directory: Path, resume: bool, overwrite: bool, json: bool
) -> None:
    if not resume:  # before planning, which takes a while
        torchrun.first(lambda: _require_free(settings, directory, overwrite), "whether the directory is free")
    plans = _plans(settings, corpus, directory if resume else None)
    if not resume:
        torchrun.first(lambda: _begin(settings, directory, overwrite), "whether the directory is ready")
    planned.save(plans or {}, directory)
    command = torchrun.command(["train", "--out", str(directory), "--resume"])
    try:
        runs = _train(settings, corpus, directory, resume, plans)
        _finish(settings, corpus, runs, directory, json)
    except (Interrupted, KeyboardInterrupt) as stop:
        message = str(stop) or "stopped; the trained models are saved"
        errors.print(f"\n{message}; continue with:\n  {command}", soft_wrap=True)
        raise typer.Exit(130) from None


def _explain(settings: experiment.RunSettings, json: bool) -> None:
    """Print the table of mixed precision and the memory of a step for each run."""
    settings = replace(settings, precisions=tuple(dict.fromkeys(("fp32", *settings.precisions))))
    memory = _memory(settings, settings.model)
    if json:
        print_json({"parts": [asdict(part) for part in PARTS], "bytes": [row.to_dict() for row in memory]})
        return
    rows = [(p.name, p.of_fp32, p.of_short + (f", on CUDA {p.on_cuda}" if p.on_cuda else ""), p.why) for p in PARTS]
    out.print("Dtypes in bf16 and fp16 runs, and in layers without a recipe:")
    out.print(rich_table(("part", "fp32", "16-bit", "why"), rows))
    out.print("\nMemory per run:")
    out.print(rich_table(HEAD, written(memory), numbers=range(1, len(HEAD))))
    out.print(SAYS)


def _memory(settings: experiment.RunSettings, shape: GPTConfig) -> list[Held]:
    """The memory of each run, and of the runs between the first and each other one."""
    return [held(shape, config) for config in one_by_one([settings.of(name) for name in settings.precisions])]


def _begin(settings: experiment.RunSettings, directory: Path, overwrite: bool) -> None:
    """Prepare ``directory`` for a new run; delete the files that its saved settings name."""
    _require_free(settings, directory, overwrite)
    if (directory / "settings.json").exists():
        (directory / "report.md").unlink(missing_ok=True)
        for precision in experiment.RunSettings.load(directory).precisions:
            paths = (*report.watch_paths(directory, precision), *report.memory_paths(directory, precision))
            experiment.remove_state(directory, precision)
            for path in (planned.path_of(directory, precision), *paths):
                path.unlink(missing_ok=True)
    settings.save(directory)


def _require_free(settings: experiment.RunSettings, directory: Path, overwrite: bool) -> None:
    """Create ``directory`` and check that a new run may write to it.

    Raises:
        ValueError: A run would be overwritten without ``overwrite``, or files that lowbit train did not write.
        OSError: The directory is not writable.
    """
    make_writable(directory)
    if not (directory / "settings.json").exists():
        _require_no_files(settings, directory)
        return
    experiment.RunSettings.load(directory)
    if not overwrite:
        finished = (directory / "report.md").exists()
        state, resume = ("a finished", "") if finished else ("an unfinished", "--resume to continue it, ")
        raise ValueError(f"{directory} holds {state} run; add {resume}--overwrite to start over, or pass another --out")


def _require_no_files(settings: experiment.RunSettings, directory: Path) -> None:
    """Raise ValueError if ``directory``, which has no settings of a run, has files that a run would overwrite."""
    states = [
        path
        for precision in settings.precisions
        for path in (*experiment.state_paths(directory, precision), planned.path_of(directory, precision))
    ]
    for path in (*(directory / name for name in (*report.FILES, "model")), *states):
        if path.exists():
            raise ValueError(
                f"{path} would be overwritten, and there is no settings.json of lowbit train next to it; move the file "
                "away, or pass another --out"
            )


def _resumed(context: typer.Context, requested: experiment.RunSettings, directory: Path) -> experiment.RunSettings:
    """The saved settings. Raises ValueError if an option of the command line differs from them."""
    saved = experiment.RunSettings.load(directory)
    if saved.strategy is not None and not launched():
        raise ValueError(needs_torchrun(f"the run in {directory}, with --strategy {saved.strategy},"))
    if saved.strategy is None and requested.strategy is not None:
        raise ValueError(f"the run in {directory} has one process; resume with lowbit train --resume, without torchrun")
    options = set_options(context) - {"directory", "resume", "overwrite", "json", "timeout"}
    old, new = _flat(saved), _flat(requested)
    renamed = {"length": "context", "precision": "precisions", "recipe": "recipes"}
    for name in sorted(options):
        key = renamed.get(name, name)
        if old[key] != new[key]:
            raise ValueError(
                f"--resume continues with {key} {old[key]}, got {new[key]}; leave the option out, or start a new run "
                "with another --out"
            )
    return saved


def _flat(settings: experiment.RunSettings) -> dict[str, Any]:
    values = asdict(settings)
    return {**values.pop("model"), **values.pop("train"), **values}


def _plans(settings: experiment.RunSettings, corpus: Corpus, directory: Path | None) -> dict[str, TrainingPlan] | None:
    """The plan of each run, printed to standard error; None without a budget."""
    if settings.memory is None:
        return None
    with planning_bar("planning") as progress:
        plans = planned.plans(settings, corpus, directory, progress)
    for precision, plan in plans.items():
        peak = f"predicted peak {amount(plan.peak_bytes)} of {amount(plan.budget)}"
        errors.print(f"{precision}: {words(plan.settings)}; {peak}", soft_wrap=True)
    return plans


def _train(
    settings: experiment.RunSettings,
    corpus: Corpus,
    directory: Path,
    resume: bool,
    plans: dict[str, TrainingPlan] | None,
) -> list[Trainer]:
    bar = Progress(
        TextColumn("{task.description:<6}", "bold"), BarColumn(None), TextColumn("{task.completed}/{task.total}"),
        TextColumn("{task.fields[status]}"), TimeRemainingColumn(compact=True), console=errors,
    )  # fmt: skip
    runs = []
    with bar:
        for trainer in experiment.trainers(settings, corpus, directory, resume, plans):
            name = trainer.config.precision
            task = bar.add_task(name, total=trainer.config.steps, completed=trainer.step, status="")
            _show(bar, task, trainer)
            trainer.run(lambda now, task=task: _show(bar, task, now))  # type: ignore[misc]
            runs.append(trainer)
    return runs


def _show(bar: Progress, task: TaskID, trainer: Trainer) -> None:
    history = trainer.history
    held_out = f" held-out {history.held_out[-1][1]:.3f}" if history.held_out else ""
    skipped = f" skipped {history.skipped}" if history.skipped else ""
    loss = f"loss {history.train[-1]:.3f}{held_out}{skipped}" if history.train else "starting"
    status = f"{loss}  {trainer.tokens_per_second:,.0f} tok/s"
    bar.update(task, completed=trainer.step, status=status)
    config = trainer.config
    if not errors.is_terminal and trainer.step and trainer.step % config.eval_every == 0:  # logs cannot redraw a bar
        errors.print(f"{config.precision} {trainer.step}/{config.steps}  {status}", soft_wrap=True)


def _finish(settings: experiment.RunSettings, corpus: Corpus, runs: list[Trainer], directory: Path, json: bool) -> None:
    """Save the first run's model, measure every recipe on it and write the report, in the first process only."""
    model = runs[0].model
    assert isinstance(model, GPT)
    trained = experiment.plain_copy(model)
    if torchrun.rank() > 0:
        return
    experiment.save(trained, corpus.tokenizer, directory / "model")
    turns = len(OUTSIDE) + len(settings.recipes) + 1  # the last turn measures speeds
    with Progress(TextColumn("measuring {task.description}"), BarColumn(None), console=errors) as bar:
        task = bar.add_task("", total=turns, completed=-1)
        rows = experiment.measure_recipes(
            trained, corpus, runs[0].windows, settings,
            lambda name: bar.update(task, description=name, advance=1),
        )  # fmt: skip
        bar.update(task, completed=turns)
    memory = [] if settings.memory else _memory(settings, trained.config)
    path = report.write(directory, settings, corpus, runs, rows, memory, torchrun.command(sys.argv[1:]))
    if json:
        print_json(experiment.as_json(settings, corpus, runs, rows, memory))
    else:
        if settings.memory:
            out.print(rich_table(planned.HEAD, planned.written(runs), numbers=range(2, len(planned.HEAD))))
        for run in runs:
            if run.memory is not None and settings.profile_memory:
                out.print(f"\nmemory of step {PROFILED} in {run.config.precision}:\n{run.memory}\n", markup=False)
        for claim in report.claims(runs, rows, memory):
            verdict = "holds" if claim.holds else Text("fails", "bold red")
            out.print(f"{claim.name}: {share_changed(claim.measured, 2)}, {claim.bound}:", verdict, soft_wrap=True)
        out.print(f"report: {path}", soft_wrap=True)
        out.print(
            f"model:  {directory / 'model'}   (quantize it: lowbit quantize {directory / 'model'} int4-weight-only)",
            soft_wrap=True,
        )
