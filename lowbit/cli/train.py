"""``lowbit train``: the demo, from text to a transformer trained in FP8 and quantized with every recipe."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from lowbit.cli.console import errors, out, print_error, print_json
from lowbit.combinations import refusal
from lowbit.demo import experiment, planned, report, torchrun
from lowbit.demo.config import OUTSIDE, TrainConfig
from lowbit.demo.data import Corpus
from lowbit.demo.explain import HEAD, SAYS, Held, held, one_by_one, written
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import PROFILED, Interrupted, Trainer
from lowbit.demo.torchrun import STRATEGIES
from lowbit.files import exclusive
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

`lowbit train --data book.txt --steps 2000` — on a text of one's own

`lowbit train --optimizer lion4bit` — states of 4 bits; adamw8bit, sgd8bit, muon8bit and so on

`lowbit train --precision fp8-block --recipe mxfp4 --recipe nf4` — other number formats

`lowbit train --explain --precision fp16` — what is computed in what, and the bytes of a step; trains nothing

`lowbit train --precision bf16 --precision nvfp4 --tail 0.1` — 4 bits, and the last tenth of the steps in bf16

`lowbit train --memory 40MiB` — each run by a plan whose steps hold no more; a share of plain training too, such as 60%

`lowbit train --watch 50` — overflow, underflow, saturation and SQNR by layer and operand, every 50 steps

`torchrun --nproc-per-node 2 -m lowbit train --strategy zero1` — on two processes, with the batches of one

`lowbit train --resume` — go on after Ctrl-C, bit for bit as if nothing had happened
"""

_MODEL, _TRAIN = GPTConfig(), TrainConfig()
_PRECISION = (
    "fp32, bf16, fp16 or a recipe that trains; repeat. By default bf16 (fp32 on a processor without it) and fp8."
)
_OPTIMIZER = "Such as adamw8bit or lion4bit. By default adamw for floats, and adamw8bit for recipes."
_ACTIVATIONS = "In runs of recipes, keep inputs of norms and activation functions for backward as FP8 codes."
_CHECKPOINTING = "In all runs, keep a block's input alone for backward, which computes its inside again."
_TAIL = "Share of the steps, the last ones, in which runs of recipes compute in bf16 or fp32 alone, such as 0.1."
_PROFILE = "Profile the memory of one step of each run: a table, and memory.json with memory.png."
_MEMORY = (
    "What a step may hold, such as 1GiB or 60% of plain training: each run, in its precision, trains by a plan that "
    "chooses checkpoints, parts of a batch, bits of states (unless --optimizer is given) and their place."
)
_WAY = f"How the processes that torchrun started share the training: {', '.join(STRATEGIES)}. By default ddp."
_TIMEOUT = "Seconds that a process waits for the others before it takes one for lost."
_WATCH = "Every N steps, note what the casts of low precision lose, by layer and operand; 0: never."

#: Seconds from a SIGTERM outside of training to the end of the process.
_GRACE = 2.0


def train(
    context: typer.Context,
    directory: Annotated[Path, typer.Option("--out", help="Where everything goes.")] = Path("out/demo"),
    data: Annotated[Path | None, typer.Option(help="UTF-8 text to train on instead of Python's documentation.")] = None,
    precision: Annotated[list[str] | None, typer.Option(help=_PRECISION)] = None,
    optimizer: Annotated[str | None, typer.Option(help=_OPTIMIZER)] = None,
    recipe: Annotated[list[str] | None, typer.Option(help="Recipe to quantize with; repeat. All by default.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of each run.")] = _TRAIN.steps,
    batch: Annotated[int, typer.Option(help="Sequences in a step.")] = _TRAIN.batch,
    length: Annotated[int, typer.Option("--context", help="Tokens in a sequence.")] = _MODEL.context,
    lr: Annotated[float, typer.Option(help="Highest learning rate.")] = _TRAIN.lr,
    seed: Annotated[int, typer.Option(help="Of weights and batches.")] = _TRAIN.seed,
    layers: Annotated[int, typer.Option(help="Blocks.")] = _MODEL.layers,
    dim: Annotated[int, typer.Option(help="Width of the model.")] = _MODEL.dim,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = _MODEL.heads,
    hidden: Annotated[int, typer.Option(help="Width of the feed-forward layer.")] = _MODEL.hidden,
    vocab: Annotated[int, typer.Option(help="Tokens of the vocabulary; 256 is bytes.")] = _MODEL.vocab,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = _TRAIN.save_every,
    eval_every: Annotated[int, typer.Option(help="Steps between held-out evaluations.")] = _TRAIN.eval_every,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help=_CHECKPOINTING)] = False,
    compress_activations: Annotated[bool, typer.Option(help=_ACTIVATIONS)] = True,
    tail: Annotated[float, typer.Option(help=_TAIL)] = _TRAIN.tail,
    watch: Annotated[int, typer.Option(metavar="N", help=_WATCH)] = 0,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help=_MEMORY)] = None,
    profile_memory: Annotated[bool, typer.Option("--profile-memory", help=_PROFILE)] = False,
    strategy: Annotated[str | None, typer.Option(help=_WAY)] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help=_TIMEOUT)] = torchrun.TIMEOUT,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away the run in --out.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print what is computed in what, and stop.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report's numbers as JSON.")] = False,
) -> None:
    """Train a small GPT in bf16 (or fp32) and in FP8 on English text, quantize it with every recipe, and report.

    Ctrl-C finishes the step and saves; --resume goes on bit-exactly. Under torchrun the processes train together.
    """
    if strategy is not None and not torchrun.launched():
        raise ValueError(_alone(f"--strategy {strategy}"))
    if strategy is None and torchrun.launched() and int(os.environ["WORLD_SIZE"]) > 1:
        strategy = "ddp"
    with _together(timeout) if torchrun.launched() else nullcontext():
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


def _alone(what: str) -> str:
    """Why ``what`` does not train in a process that torchrun did not start."""
    return (
        f"{what} is of several processes, and torchrun started none; start it with "
        "torchrun --nproc-per-node 2 -m lowbit train, and the same options"
    )


@contextmanager
def _together(timeout: float) -> Iterator[None]:
    """Within, the processes that torchrun started are one group, of which the first alone prints. An error ends this
    process: what all raise is told once.
    """
    before = signal.signal(signal.SIGTERM, _end_soon)
    is_news: Callable[[Exception], bool] = lambda _: True  # while the processes have not met
    try:
        with torchrun.joined(timeout) as is_news:
            for console in (out, errors):
                console.quiet = torchrun.rank() > 0
            yield
    except typer.Exit:
        raise
    except Exception as error:
        errors.quiet = False
        if is_news(error):
            print_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # threads of the group may wait for a process that is lost, and would hold or abort a plain exit
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_soon(*_: object) -> None:
    """End this process a little later: torchrun asks for that as soon as another has ended, and this one says why."""
    timer = threading.Timer(_GRACE, os._exit, (128 + signal.SIGTERM,))
    timer.daemon = True
    timer.start()


def _demo(settings: experiment.RunSettings, directory: Path, resume: bool, overwrite: bool, json: bool) -> None:
    """Train, save and report. What is written to ``directory`` the first process writes."""
    plotless = report.without_plots()
    if plotless:
        errors.print(plotless, soft_wrap=True)
    corpus = settings.corpus()
    if not resume:
        experiment.check(settings, corpus, directory)
    with ExitStack() as locks:
        torchrun.first(lambda: _lock(directory, locks), "whether another run has the directory")
        _in_directory(settings, corpus, directory, resume, overwrite, json)


def _lock(directory: Path, locks: ExitStack) -> None:
    """Keep other runs out of ``directory``. Raises: BlockingIOError where one is in there; OSError."""
    _make(directory)
    locks.enter_context(exclusive(directory, "lowbit train --out"))


def _in_directory(
    settings: experiment.RunSettings, corpus: Corpus, directory: Path, resume: bool, overwrite: bool, json: bool
) -> None:
    """``_demo``, in a directory that no other run writes to."""
    if not resume:  # before plans, which take a while
        torchrun.first(lambda: _require_free(settings, directory, overwrite), "whether the directory is free")
    plans = _plans(settings, corpus, directory if resume else None)
    if not resume:
        torchrun.first(lambda: _begin(settings, directory, overwrite), "whether the directory is ready")
    planned.save(plans or {}, directory)
    again = torchrun.command(["train", "--out", str(directory), "--resume"])
    try:
        runs = _train(settings, corpus, directory, resume, plans)
        _finish(settings, corpus, runs, directory, json)
    except (Interrupted, KeyboardInterrupt) as stop:
        saved = str(stop) or "stopped; the trained models are saved"
        errors.print(f"\n{saved}; go on with:\n  {again}", soft_wrap=True)
        raise typer.Exit(130) from None


def _explain(settings: experiment.RunSettings, json: bool) -> None:
    """The table of mixed precision, and what a step of each run holds."""
    wanted = replace(settings, precisions=tuple(dict.fromkeys(("fp32", *settings.precisions))))
    memory = _memory(wanted, settings.model)
    if json:
        print_json({"parts": [asdict(part) for part in PARTS], "bytes": [row.to_dict() for row in memory]})
        return
    rows = [(p.name, p.of_fp32, p.of_short + (f", on CUDA {p.on_cuda}" if p.on_cuda else ""), p.why) for p in PARTS]
    out.print("In bf16 and fp16, and outside of what a recipe computes:")
    out.print(rich_table(("part", "of fp32", "of 16 bits", "why"), rows))
    out.print("\nMemory of a run:")
    out.print(rich_table(HEAD, written(memory), numbers=range(1, len(HEAD))))
    out.print(SAYS)


def _memory(settings: experiment.RunSettings, shape: GPTConfig) -> list[Held]:
    """What the runs hold, and what lies between the first and each other."""
    return [held(shape, config) for config in one_by_one([settings.of(name) for name in settings.precisions])]


def _begin(settings: experiment.RunSettings, directory: Path, overwrite: bool) -> None:
    """Make ``directory`` ready for a new run. What goes is what the settings found there say an earlier run wrote.

    Raises as ``_require_free``.
    """
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
    """Whether a new run may begin in ``directory``, which is made.

    Raises: ValueError where that would throw away a run without ``overwrite``, or files that no run of this command
    wrote; OSError where nothing can be written.
    """
    _make(directory)
    if not (directory / "settings.json").exists():
        _refuse_strangers(settings, directory)
        return
    experiment.RunSettings.load(directory)
    if not overwrite:
        finished = (directory / "report.md").exists()
        state, resume = ("a finished", "") if finished else ("an unfinished", "--resume to go on with it, ")
        raise ValueError(f"{directory} holds {state} run; add {resume}--overwrite to start over, or give another --out")


def _make(directory: Path) -> None:
    """The directory. Raises: OSError where there can be none, or nothing can be written to it."""
    if directory.is_file():
        raise NotADirectoryError(f"{directory} is a file; give a directory with --out")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise type(error)(
            f"cannot write to {directory} ({error.strerror}); give another directory with --out"
        ) from None


def _refuse_strangers(settings: experiment.RunSettings, directory: Path) -> None:
    """Without settings beside them, files with the names that a run writes are somebody's."""
    states = [
        path
        for precision in settings.precisions
        for path in (*experiment.state_paths(directory, precision), planned.path_of(directory, precision))
    ]
    for path in (*(directory / name for name in (*report.FILES, "model")), *states):
        if path.exists():
            raise ValueError(
                f"{path} would be overwritten, and no settings.json beside it says that lowbit train wrote it; "
                "move it away, or give another --out"
            )


def _resumed(context: typer.Context, asked: experiment.RunSettings, directory: Path) -> experiment.RunSettings:
    """The saved settings. What is given beside --resume must agree with them."""
    saved = experiment.RunSettings.load(directory)
    if saved.strategy is not None and not torchrun.launched():
        raise ValueError(_alone(f"the run in {directory}, with --strategy {saved.strategy},"))
    if saved.strategy is None and asked.strategy is not None:
        raise ValueError(f"the run in {directory} is of one process; go on with lowbit train --resume, not torchrun")
    sources = {name: context.get_parameter_source(name) for name in context.params}
    given = {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
    given -= {"directory", "resume", "overwrite", "json", "timeout"}
    old, new = _flat(saved), _flat(asked)
    renamed = {"length": "context", "precision": "precisions", "recipe": "recipes"}
    for name in sorted(given):
        key = renamed.get(name, name)
        if old[key] != new[key]:
            raise ValueError(
                f"--resume goes on with {key} {old[key]}, not {new[key]}; leave the option out, or start over elsewhere"
            )
    return saved


def _flat(settings: experiment.RunSettings) -> dict[str, Any]:
    values = asdict(settings)
    own = {
        k: values[k]
        for k in ("precisions", "recipes", "optimizer", "data", "watch", "profile_memory", "memory", "strategy")
    }
    return {**values["model"], **values["train"], **own}


def _plans(settings: experiment.RunSettings, corpus: Corpus, directory: Path | None) -> dict[str, TrainingPlan] | None:
    """The plans of the runs where there is a budget, with what they chose on standard error."""
    if settings.memory is None:
        return None
    with planning_bar("planning") as progress:
        plans = planned.plans(settings, corpus, directory, progress)
    for precision, plan in plans.items():
        peak = f"a step is predicted to hold {amount(plan.peak_bytes)} of {amount(plan.budget)}"
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
    if not errors.is_terminal and trainer.step and trainer.step % config.eval_every == 0:  # a log has no bar to redraw
        errors.print(f"{config.precision} {trainer.step}/{config.steps}  {status}", soft_wrap=True)


def _finish(settings: experiment.RunSettings, corpus: Corpus, runs: list[Trainer], directory: Path, json: bool) -> None:
    """Save the first run's model, measure every recipe on it and write the report, in the first process."""
    model = runs[0].model
    assert isinstance(model, GPT)
    trained = experiment.plain_copy(model)
    if torchrun.rank() > 0:
        return
    experiment.save(trained, corpus.tokenizer, directory / "model")
    turns = len(OUTSIDE) + len(settings.recipes) + 1  # the last one is that of the speeds
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
