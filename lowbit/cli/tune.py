"""``lowbit train MODEL --text FILE``: fine-tune a model of transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lowbit.cli.console import errors, out, print_json
from lowbit.cli.models import MODEL as PATHS
from lowbit.cli.models import Dtype, cast_, load, load_float
from lowbit.convert.engine import quantized_layers
from lowbit.demo import torchrun
from lowbit.files import exclusive, read_json, write_json
from lowbit.finetune import report
from lowbit.finetune.session import STATE, Session, TuneConfig, add_adapters, first_batch
from lowbit.finetune.texts import Document, read, split
from lowbit.interop import tokenizer_of
from lowbit.interrupts import Interrupted
from lowbit.plan import TrainingPlan, fit
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
    "eval_every", "save_every",
}  # fmt: skip


def tune_command(context: typer.Context, model: Path, text: Path | None, held_out: Path | None) -> None:
    """Fine-tune ``model``; options that are not set have the defaults of ``TuneConfig``."""
    refuse_options(context, sorted(context.params.keys() - _WITH_MODEL), "applies to the demo, not to MODEL")
    if text is None:
        raise ValueError(f"lowbit train {model} expects --text FILE: UTF-8 text, .jsonl, or token ids")
    names = {
        "batch": "rows",
        **{name: name for name in ("steps", "length", "lr", "seed", "adapters", "eval_every", "save_every")},
    }
    config = TuneConfig(**{names[name]: context.params[name] for name in set_options(context) & names.keys()})
    params = context.params
    directory = params["directory"] if "directory" in set_options(context) else Path("out/train")
    flags = {name: params[name] for name in ("resume", "overwrite", "json")}
    tune(model, text, held_out, config, params["memory"], directory, **flags)


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
    model: Path, text: Path, held_out: Path | None, config: TuneConfig, memory: str | None, directory: Path, *,
    resume: bool = False, overwrite: bool = False, json: bool = False,
) -> None:  # fmt: skip
    """Fine-tune ``model`` on ``text`` and write the result to ``directory``.

    Raises:
        ValueError: The model, the text or the budget does not fit, or ``directory`` has another run.
    """
    if memory is not None:
        budget_in(memory, "--memory")  # raises before the model is loaded
    directory.mkdir(parents=True, exist_ok=True)
    with exclusive(directory, "lowbit train --out"):
        request = {
            "model": str(model.resolve()), "text": str(text.resolve()), "memory": memory,
            "held_out": None if held_out is None else str(held_out.resolve()), "config": asdict(config),
        }  # fmt: skip
        _check_directory(directory, request, resume, overwrite)
        tokenizer = tokenizer_of(model)
        documents = read(text, tokenizer)
        train, held = (
            (documents, read(held_out, tokenizer)) if held_out is not None else split(documents, config.length)
        )
        trained = _model(model, config).to("cuda" if torch.cuda.is_available() else "cpu")
        plan = None if memory is None else _planned(trained, train, config, memory, directory / PLAN)
        write_json(directory / SETTINGS, request)
        session = Session(trained, train, held, config, directory, plan)
        if resume:
            session.load()
        _run(session)
        if config.adapters:
            trained.save_pretrained(directory / ADAPTER)
        session.write_model(directory / MODEL, tokenizer)
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
        for name in (STATE, PLAN):
            (directory / name).unlink(missing_ok=True)


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
    return add_adapters(model, config.adapters, config.seed).train()


def _planned(model: Any, train: list[Document], config: TuneConfig, memory: str, path: Path) -> TrainingPlan:
    """The saved plan, or a new one, printed to standard error."""
    if path.exists():
        plan = TrainingPlan.load(path)
    else:
        with planning_bar("planning") as progress:
            plan = fit(model, first_batch(model, train, config), memory, progress=progress)
        plan.save(path)
    peak = f"predicted peak {amount(plan.peak_bytes)} of {amount(plan.budget)}"
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
