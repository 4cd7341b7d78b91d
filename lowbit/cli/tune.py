"""``lowbit train MODEL --text FILE``: fine-tune a model of transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lowbit.cli.console import errors, out, print_json
from lowbit.cli.models import MODEL as PATHS
from lowbit.cli.models import Dtype, cast_, load, load_float
from lowbit.cli.processes import lock
from lowbit.convert.engine import quantized_layers
from lowbit.dist_utils import processes
from lowbit.distributed import torchrun
from lowbit.distributed.checkpoint import remove
from lowbit.files import read_json, shown, write_json
from lowbit.finetune import report
from lowbit.finetune.session import (
    SHARED_STATE,
    STATE,
    Session,
    TuneConfig,
    add_adapters,
    check_pairs,
    first_batch,
)
from lowbit.finetune.texts import Document, read, split
from lowbit.interop import tokenizer_of
from lowbit.interrupts import Interrupted
from lowbit.machine import float_precision
from lowbit.plan import TECHNIQUES, TrainingPlan, fit
from lowbit.plan.fitting.choices import words
from lowbit.progress import bar as planning_bar
from lowbit.sizes import amount, budget_in

__all__ = [
    "ADAPTERS", "HELD_OUT", "MODEL_HELP", "OF_MODEL", "TEXT", "refuse_options", "set_options", "tune_command",
]  # fmt: skip

#: The files of a run in its directory.
SETTINGS, PLAN, MODEL, ADAPTER = "finetune.json", "plan.json", "model", "adapter"


MODEL_HELP = f"Model to fine-tune: {PATHS}. Without it, the demo trains a GPT of its own."
TEXT = "With MODEL: UTF-8 text, .jsonl (text, prompt and completion, or messages), .npy or .bin with token ids."
HELD_OUT = "With MODEL: a file like --text for the held-out loss; by default a twentieth of --text."
ADAPTERS = "With MODEL: train LoRA adapters of this rank, also on a quantized model; 0 trains all weights."

#: Parameters that need MODEL, and parameters that are taken with it; others belong to the demo.
OF_MODEL = ("text", "held_out", "adapters")
_WITH_MODEL = {
    "model", *OF_MODEL, "directory", "memory", "resume", "overwrite", "json", "steps", "batch", "length", "lr", "seed",
    "eval_every", "save_every", "precision", "watch", "tail", "strategy", "timeout",
}  # fmt: skip

#: Options that are settings of the training, by their names in ``TuneConfig``.
_CONFIG = {
    "rows": "batch",
    **{
        name: name
        for name in ("steps", "length", "lr", "seed", "adapters", "eval_every", "save_every", "watch", "tail")
    },
}


@dataclass(frozen=True)
class Asked:
    """A run that is asked for.

    Attributes:
        model: Path of the model.
        text: File to train on.
        held_out: File for the held-out loss; None: a part of ``text``.
        config: Settings of the training.
        memory: Budget of a step in each process, for a plan; None: no plan.
        strategy: Sharding strategy; None: one process, or the choice of a plan.
        directory: Directory of the results.
    """

    model: Path
    text: Path
    held_out: Path | None
    config: TuneConfig
    memory: str | None
    strategy: str | None
    directory: Path

    def values(self) -> dict[str, Any]:
        """The settings that a resumed run must have, as JSON values."""
        return {
            "model": str(self.model.resolve()), "text": str(self.text.resolve()), "memory": self.memory,
            "held_out": None if self.held_out is None else str(self.held_out.resolve()), "strategy": self.strategy,
            "config": asdict(self.config),
        }  # fmt: skip


def tune_command(
    context: typer.Context, model: Path, text: Path | None, held_out: Path | None, device: torch.device
) -> None:
    """Fine-tune ``model`` on ``device``; options that are not set have the defaults of ``TuneConfig``."""
    refuse_options(context, sorted(context.params.keys() - _WITH_MODEL), "applies to the demo, not to MODEL")
    if text is None:
        raise ValueError(f"lowbit train {model} expects --text FILE: UTF-8 text, .jsonl, or token ids")
    params, given = context.params, set_options(context)
    values = {name: params[option] for name, option in _CONFIG.items() if option in given}
    precisions = params["precision"] or [None]
    if len(precisions) > 1:
        raise ValueError(f"--precision is given {len(precisions)} times; MODEL is trained once, so give one")
    config = TuneConfig(precision=precisions[0], outside=float_precision(), **values)
    memory, strategy = params["memory"], params["strategy"]
    if memory is not None:
        budget_in(memory, "--memory")  # raises before the model is loaded
        _check_precision(config.precision)
    if strategy is not None and strategy not in torchrun.STRATEGIES:
        raise ValueError(f"--strategy must be one of {', '.join(torchrun.STRATEGIES)}, got {shown(strategy)}")
    if strategy is None and memory is None and processes() > 1:
        strategy = "ddp"
    directory = params["directory"] if "directory" in given else Path("out/train")
    asked = Asked(model, text, held_out, config, memory, strategy, directory)
    check_pairs(config, planned=memory is not None, shared=processes() > 1)
    with ExitStack() as locks:
        torchrun.first(lambda: lock(directory, locks), "whether another run has the directory")
        tune(asked, device, **{name: params[name] for name in ("resume", "overwrite", "json")})


def _check_precision(precision: str | None) -> None:
    """Raise ValueError for a precision that plans do not know."""
    known = [row.name for row in TECHNIQUES["precision"]]
    if precision is not None and precision not in known:
        raise ValueError(
            f"--precision {precision} with --memory: plans know {', '.join(known)}; give one of them, or drop --memory"
        )


def set_options(context: typer.Context) -> set[str]:
    """The parameters that the command line sets."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def refuse_options(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise ValueError if the command line sets one of the parameters."""
    first = next((name for name in names if name in set_options(context)), None)
    if first is not None:
        option = next(row.opts[0] for row in context.command.params if row.name == first)
        raise ValueError(f"{option} {why}; leave it out")


def tune(
    asked: Asked, device: torch.device, *, resume: bool = False, overwrite: bool = False, json: bool = False
) -> None:
    """Fine-tune a model and write the result to a directory. All processes call it, and the first one writes.

    Raises:
        ValueError: The model, the text or the budget does not fit, or the directory has another run.
    """
    config, directory = asked.config, asked.directory
    request = asked.values()
    torchrun.first(lambda: _check_directory(directory, request, resume, overwrite), "whether the directory is free")
    tokenizer = tokenizer_of(asked.model)
    documents = read(asked.text, tokenizer)
    train, held = (
        (documents, read(asked.held_out, tokenizer)) if asked.held_out is not None else split(documents, config.length)
    )
    torchrun.share(config.rows)
    trained = _model(asked.model, config).to(device)
    plan = None if asked.memory is None else _planned(trained, train, asked)
    torchrun.first(lambda: write_json(directory / SETTINGS, request), "whether the settings are written")
    session = Session(trained, train, held, config, directory, plan, asked.strategy)
    if resume:
        session.load()
    _run(session)
    session.write_model(directory / MODEL, tokenizer, directory / ADAPTER if config.adapters else None)
    if torchrun.rank() > 0:
        return
    path = report.write(session, directory, torchrun.command(sys.argv[1:]))
    if json:
        print_json(report.numbers(session))
        return
    first, last = session.history.held_out[0][1], session.history.held_out[-1][1]
    out.print(f"held-out loss: {first:.4f} before, {last:.4f} after {session.step} steps", soft_wrap=True)
    out.print(f"report: {path}", soft_wrap=True)
    if config.adapters:
        out.print(f"adapter: {directory / ADAPTER}", soft_wrap=True)
    out.print(
        f"model:  {directory / MODEL}   (quantize it: lowbit quantize {directory / MODEL} int4-weight-only:group32 "
        f"--text FILE)",
        soft_wrap=True,
    )


def _check_directory(directory: Path, request: dict[str, Any], resume: bool, overwrite: bool) -> None:
    """Raise ValueError if a new run would overwrite another, or if a resumed run has other settings."""
    path = directory / SETTINGS
    if not path.exists():
        if (directory / "settings.json").exists() or (directory / MODEL).exists():
            raise ValueError(f"{directory} has files of another run; pass another --out")
        if resume:
            raise ValueError(f"nothing to resume in {directory}; leave out --resume")
        return
    if resume:
        saved = read_json(path)
        changed = [f"{key} {saved.get(key)} -> {value}" for key, value in request.items() if saved.get(key) != value]
        if changed:
            raise ValueError(f"the run in {directory} has other settings ({'; '.join(changed)}); pass the same options")
    elif not overwrite:
        raise ValueError(f"{directory} holds a run; add --resume to continue it, or --overwrite to start over")
    else:
        for name in (STATE, PLAN, *report.WATCHED):
            (directory / name).unlink(missing_ok=True)
        remove(directory / SHARED_STATE)


def _model(path: Path, config: TuneConfig) -> Any:
    """The model to train: with adapters, a quantized base keeps its codes."""
    if not config.adapters:
        model, note = load_float(path, Dtype.fp32)
        if note is not None:
            errors.print(note, soft_wrap=True)
        return model.train()
    model = load(path)
    if not quantized_layers(model):
        cast_(model, Dtype.fp32)
    _name_(model, path)
    return add_adapters(model, config.adapters, config.seed).train()


def _name_(model: Any, path: Path) -> None:
    """Name a model without a name after its path, which peft writes next to the adapters."""
    if getattr(model, "name_or_path", None) == "":
        model.name_or_path = str(path)


def _planned(model: Any, train: list[Document], asked: Asked) -> TrainingPlan:
    """The saved plan, or a new one for this number of processes, printed to standard error."""
    assert asked.memory is not None
    path, config = asked.directory / PLAN, asked.config
    if torchrun.first(path.exists, "whether there is a plan"):
        plan = TrainingPlan.load(path)
    else:
        require = [name for name in (config.precision, asked.strategy) if name is not None]
        with planning_bar("planning") as progress:
            plan = fit(
                model, first_batch(model, train, config), asked.memory, require=require, gpus=processes(),
                progress=progress,
            )  # fmt: skip
        torchrun.first(lambda: plan.save(path), "whether the plan is saved")
    each = " in each process" if processes() > 1 else ""
    peak = f"predicted peak {amount(plan.peak_bytes)} of {amount(plan.budget)}{each}"
    errors.print(f"{words(plan.settings)}; {peak}", soft_wrap=True)
    return plan


def _run(session: Session) -> None:
    """Train with a progress bar; if a signal stops the run, print how to continue."""
    bar = Progress(
        BarColumn(None), TextColumn("{task.completed}/{task.total}"), TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True), console=errors,
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=session.config.steps, completed=session.step, status="")

        def show(now: Session) -> None:
            status = f"loss {now.history.train[-1]:.3f} held-out {now.history.held_out[-1][1]:.3f}  "
            status += f"{now.tokens_per_second:,.0f} tok/s"
            bar.update(task, completed=now.step, status=status)
            if not errors.is_terminal and now.step % now.config.eval_every == 0:
                errors.print(f"{now.step}/{now.config.steps}  {status}", soft_wrap=True)

        try:
            session.train(show)
        except Interrupted as stop:
            bar.stop()
            again = [*sys.argv[1:], *([] if "--resume" in sys.argv else ["--resume"])]
            errors.print(f"\n{stop}; continue with:\n  {torchrun.command(again)}", soft_wrap=True)
            raise typer.Exit(130) from None
