"""``lowbit fit``: the fastest training plan within a memory budget; ``--ladder`` measures each technique."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import nn

from lowbit.backends.cpu import processor
from lowbit.cli.console import errors, out, print_json, resumable
from lowbit.cli.memory import find
from lowbit.files import exclusive, write_atomically, write_json
from lowbit.interop import format_of
from lowbit.machine import provenance
from lowbit.memory.devices import DEVICES
from lowbit.plan import TrainingPlan
from lowbit.plan import fit as plan_training
from lowbit.plan.ladder import Climb, climb, estimate_ladder, report, rungs_of
from lowbit.plan.ladder.estimated import NUMBERS
from lowbit.plan.ladder.limits import LIMITS
from lowbit.plan.subject import Subject
from lowbit.progress import bar
from lowbit.serialize.huggingface import is_directory
from lowbit.sizes import budget_in
from lowbit.tables import markdown, rich_table

EPILOG = """
**Examples**

`lowbit fit demo --memory 60%` — the demo transformer, in 60% of the memory of plain training

`lowbit fit models/llama --memory 6GiB --rows 8 --length 1024 --out out/plan` — a Hugging Face model directory

`lowbit fit my_module:my_function --memory 2GiB --require bf16 --exclude disk` — your own model, in bf16, no disk

`lowbit fit models/llama --memory 2GiB --adapters 16 --require "nf4 base"` — QLoRA with adapters of rank 16

`lowbit fit demo --memory 100MiB --gpus 8 --link 25GB/s` — 8 processes, 100 MiB each

`lowbit fit models/llama --memory 24GiB --device rtx-4090 --adapters 16` — for a GPU that this machine lacks

`lowbit fit --ladder --memory 300MiB --quick` — each technique once, about a minute

`lowbit fit --ladder --memory 2GiB --out out/ladder` — also the largest model per technique; continues after Ctrl-C

`lowbit fit --ladder --memory 8GiB --device cuda` — on a GPU

`lowbit fit --ladder --memory 300MiB --gpus 4 --quick` — also a model sharded over 2 and 4 processes

`lowbit fit --ladder my_module:my_function --memory 2GiB` — the same techniques on your own model, estimated
"""

_LADDER = (
    "Measure memory-saving techniques one by one, each in a process with a hard memory limit. With MODEL, estimate "
    "them on that model instead."
)
_MODEL = (
    "demo, a Hugging Face model directory (config.json), or MODULE:FUNCTION. The function returns (model, batch) or "
    "(model, batch, loss); loss(output, batch) is needed if the model does not return its loss."
)
_MEMORY = "Budget for one training step: a size such as 2GiB, or with MODEL a share of plain training such as 60%."
_REQUIRE = "Option that the plan must use, such as bf16, adamw8bit, block or memory. Repeatable."
_EXCLUDE = "Option that the plan must not use, such as disk. Repeatable."
_ADAPTERS = "Rank of LoRA adapters, which are trained instead of the weights; the plan may quantize the weights."
_GPUS = "Number of processes; each must fit the budget. With --ladder: the largest number to try."
_DEVICE = f"GPU to plan for, even if this machine lacks it: {', '.join(DEVICES)}. With --ladder: cpu (default) or cuda."
_LINK = "Bandwidth between processes, such as 25GB/s."

#: Options that apply only to some uses, by parameter name.
_OF_BATCH = {"rows": "--rows", "length": "--length"}
_OF_PLAN = {"require": "--require", "exclude": "--exclude", "link": "--link", "adapters": "--adapters"}
_OF_LADDER = {"search": "--search", "quick": "--quick"}


def fit(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help=_MODEL, show_default=False)] = None,
    memory: Annotated[str | None, typer.Option(help=_MEMORY, show_default="2GiB with --ladder")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows per batch, for demo or a directory.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens per row, for demo or a directory.")] = 512,
    require: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_REQUIRE)] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_EXCLUDE)] = None,
    adapters: Annotated[int | None, typer.Option(min=1, metavar="RANK", help=_ADAPTERS, show_default=False)] = None,
    gpus: Annotated[int, typer.Option(min=1, help=_GPUS)] = 1,
    link: Annotated[str | None, typer.Option(help=_LINK, show_default="1.25GB/s, on GPUs 25GB/s")] = None,
    directory: Annotated[
        Path | None, typer.Option("--out", help="Directory for plan, report and finished runs.")
    ] = None,
    ladder: Annotated[bool, typer.Option("--ladder", help=_LADDER)] = False,
    search: Annotated[int, typer.Option(help="Tries per technique to find its largest model; 0: no search.")] = 6,
    quick: Annotated[bool, typer.Option("--quick", help="Two steps per technique, no search.")] = False,
    device: Annotated[str | None, typer.Option(help=_DEVICE, show_default=False)] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Find the fastest training plan within a memory budget. With --ladder, measure what each technique saves.

    The plan chooses precision, optimizer, checkpointing, micro-batches and offload before anything is trained.
    """
    if ladder and model is not None:
        _refuse(
            context,
            {**_OF_LADDER, "gpus": "--gpus", "device": "--device"},
            "applies to the ladder's own models, not to MODEL",
        )
        _refuse(context, _OF_PLAN, "applies to a plan, not to --ladder")
        _check_batch_options(context, model)
        _estimate(model, memory, rows, length, directory, json)
        return
    if ladder:
        _refuse(context, {**_OF_BATCH, **_OF_PLAN}, "applies to lowbit fit MODEL, and --ladder uses its own models")
        _climb("2GiB" if memory is None else memory, gpus, directory, search, quick, device or "cpu", json)
        return
    if model is None:
        raise ValueError(
            "lowbit fit expects a model and a budget (lowbit fit demo --memory 60%) or --ladder (lowbit fit --ladder "
            "--memory 2GiB); see lowbit fit --help"
        )
    _refuse(context, _OF_LADDER, "applies only to lowbit fit --ladder")
    _check_batch_options(context, model)
    if memory is None:
        raise ValueError(
            f"lowbit fit {model} expects a budget: --memory 6GiB, or a share of plain training, --memory 60%"
        )
    options: dict[str, Any] = {
        "require": tuple(require or ()), "exclude": tuple(exclude or ()), "gpus": gpus, "link": link,
        "adapters": adapters, "device": device,
    }  # fmt: skip
    with nullcontext() if directory is None else exclusive(directory, "lowbit fit --out"):
        _plan(model, memory, rows, length, {name: value for name, value in options.items() if value}, directory, json)


fit.__doc__ = f"{fit.__doc__}\n{EPILOG}"


def _refuse(context: typer.Context, options: dict[str, str], why: str) -> None:
    """Raise ValueError if the command line has one of the options."""
    for name, option in options.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{option} {why}; leave it out")


def _check_batch_options(context: typer.Context, model: str) -> None:
    """Raise ValueError for options of the batch if the model's function returns its own."""
    if ":" in model and format_of(model) is None and not is_directory(Path(model)):
        _refuse(context, _OF_BATCH, f"sets the batch that lowbit creates, but {model} returns its own batch")


# -- a plan ------------------------------------------------------------------------------------------------------------
def _plan(
    name: str, memory: str, rows: int, length: int, options: dict[str, Any], directory: Path | None, json: bool
) -> None:
    budget_in(memory, "--memory")  # raises before the model is loaded
    model, batch, loss = find(name, rows, length, "MODEL")
    try:
        plan = plan_training(model, batch, memory, loss, progress=True, **options)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
    argument = "" if loss is None else ", loss"
    file = None if directory is None else directory / "plan.json"
    code = "\n".join([*_model_lines(name, model, batch, argument), *_plan_lines(memory, options, file, argument)])
    if directory is not None:
        _save(plan, directory, f"{name} within {memory}", code)
    if json:
        print_json(plan.as_dict())
        return
    sections = ((f"{name} within {memory}", str(plan)), ("alternatives", plan.table()), ("apply it", code))
    for title, text in sections:
        out.print(title, style="bold")
        out.print(f"{text}\n", markup=False, soft_wrap=True)


def _model_lines(name: str, model: nn.Module, batch: Any, loss: str) -> list[str]:
    """Python lines that build the model and the batch; ``loss`` is ``", loss"`` or empty."""
    row = format_of(name)
    if ":" in name and row is None and not is_directory(Path(name)):
        module, _, function = name.partition(":")
        return [
            "import lowbit as lb",
            f"from {module} import {function}",
            "",
            f"model, batch{', loss' if loss else ''} = {function}()",
        ]
    cls = type(model).__name__
    module, imports, expression = ("lowbit.demo.gpt", "GPT, GPTConfig", "GPT(GPTConfig())")
    if name != "demo":
        module, imports = "transformers", cls
        expression = f"{cls}.from_pretrained({name!r}, dtype='auto').train()"
    items = batch.items() if isinstance(batch, dict) else [("", batch)]
    zeros = {key: f"torch.zeros{tuple(tensor.shape)}.to({tensor.dtype})" for key, tensor in items}
    value = zeros.get("") or "{" + ", ".join(f"{key!r}: {code}" for key, code in zeros.items()) + "}"
    start = ["import torch", "import lowbit as lb", f"from {module} import {imports}", "", f"model = {expression}"]
    if row is not None:
        start = ["import torch", "import lowbit as lb", "", f"model = lb.load_model({name!r}).train()"]
        if row.contents(Path(name)).recipes:
            start.append("lb.dequantize_(model)  # training needs float weights")
    return [
        *start, f"batch = {value}  # example: use tensors of these shapes",
    ]  # fmt: skip


def _plan_lines(memory: str, options: dict[str, Any], file: Path | None, loss: str) -> list[str]:
    """Python lines that load the plan from ``file``, or compute it again, and train with it."""
    arguments = "".join(f", {key}={value!r}" for key, value in options.items() if (key, value) != ("gpus", 1))
    plan = (
        f"lb.fit(model, batch, {memory!r}{loss}{arguments})"
        if file is None
        else f"lb.plan.TrainingPlan.load({str(file)!r})"
    )
    count = options["gpus"]
    start = [f"torch.distributed.init_process_group()  # torchrun --nproc-per-node {count}"] if count > 1 else []
    return [
        *start,
        f"plan = {plan}",
        f"run = plan.apply_(model{loss}, lr=1e-3)  # in place",
        "loss = run.step(batch)  # for each batch",
    ]


def _save(plan: TrainingPlan, directory: Path, title: str, code: str) -> None:
    """Write ``plan.json``, ``plan.md`` and, if matplotlib is installed, ``plan.png``."""
    plan.save(directory / "plan.json")
    plots = find_spec("matplotlib") is not None
    if plots:
        plan.plot(directory / "plan.png")
    else:
        errors.print(f"no plot: matplotlib is missing; {sys.executable} -m pip install matplotlib", soft_wrap=True)
    origin = provenance(shlex.join(["lowbit", *sys.argv[1:]]), kernels=processor())
    lines = [
        f"# {title}", "", "```", str(plan), "```", "", "## Alternatives", "",
        *(["![peaks and times to choose from](plan.png)", ""] if plots else []),
        "```", plan.table(), "```", "", "## Apply it", "", "```python", code, "```", "",
        "## How it was made", "", *(f"- {key}: {value}" for key, value in origin.items()),
    ]  # fmt: skip
    write_atomically(directory / "plan.md", lambda file: file.write("\n".join(lines).encode() + b"\n"))
    errors.print(f"plan: {directory / 'plan.json'}", soft_wrap=True)


# -- the ladder --------------------------------------------------------------------------------------------------------
def _climb(memory: str, gpus: int, directory: Path | None, search: int, quick: bool, device: str, json: bool) -> None:
    if device not in LIMITS:
        raise ValueError(f"--device is one of {', '.join(LIMITS)}, got {device!r}")
    if search < 0:
        raise ValueError(f"--search expects a number of models, got {search}; 0 disables the search")
    steps, tries = (2, 0) if quick else (3, search)
    limit = budget_in(memory, "--memory", shares=False).of(0)
    request = Climb(limit, device, steps, tries, directory)
    with nullcontext() if directory is None else exclusive(directory, "lowbit fit --ladder --out"):
        with bar("climbing") as progress, resumable():
            climbed = climb(request, rungs_of(gpus), progress)
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


def _estimate(name: str, memory: str | None, rows: int, length: int, directory: Path | None, json: bool) -> None:
    """Print the ladder of estimated peaks of the model."""
    if memory is not None:
        budget_in(memory, "--memory")  # raises before the model is loaded
    model, batch, loss = find(name, rows, length, "MODEL")
    with bar("estimating") as progress:
        ladder = estimate_ladder(Subject(model, batch, loss), memory, progress=progress)
    head, table = ladder.table()
    if directory is not None:
        origin = provenance(shlex.join(["lowbit", *sys.argv[1:]]), kernels=processor())
        lines = [
            f"# Memory techniques on {name}, estimated", "", markdown(head, table, NUMBERS), "",
            *(f"- {line}" for line in ladder.remarks()), "",
            "## How it was made", "", *(f"- {key}: {value}" for key, value in origin.items()),
        ]  # fmt: skip
        write_json(directory / "ladder.json", {**ladder.as_dict(), "made": origin})
        write_atomically(directory / "ladder.md", lambda file: file.write("\n".join(lines).encode() + b"\n"))
    if json:
        print_json(ladder.as_dict())
        return
    out.print(f"{name}: each rung adds to the rungs above it that lower the peak; all rows are estimates")
    out.print(rich_table(head, table, NUMBERS))
    for line in ladder.remarks():
        out.print(line, soft_wrap=True)
    if directory is not None:
        errors.print(f"report: {directory / 'ladder.md'}", soft_wrap=True)
