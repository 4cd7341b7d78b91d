"""``lowbit fit``: the fastest training of a model within a budget, and with ``--ladder`` what each technique buys."""

from __future__ import annotations

import shlex
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from torch import Tensor, nn

from lowbit.backends.cpu import processor
from lowbit.cli.console import errors, out, print_json, resumable
from lowbit.cli.memory import find
from lowbit.files import exclusive, write_atomically
from lowbit.machine import provenance
from lowbit.plan import TrainingPlan
from lowbit.plan import fit as plan_training
from lowbit.plan.ladder import Climb, climb, report, rungs_of
from lowbit.plan.ladder.limits import LIMITS
from lowbit.progress import bar
from lowbit.serialize.huggingface import is_directory
from lowbit.sizes import budget_in
from lowbit.tables import rich_table

EPILOG = """
**Examples**

`lowbit fit demo --memory 60%` — the demo's transformer, in 60% of what plain training takes

`lowbit fit models/llama --memory 6GiB --rows 8 --length 1024 --out out/plan` — of a directory of transformers

`lowbit fit mine:made --memory 2GiB --require bf16 --exclude disk` — of your own function, with choices of yours

`lowbit fit demo --memory 100MiB --gpus 8 --link 25GB/s` — on 8 processes, each within its memory

`lowbit fit --ladder --memory 300MiB --quick` — each technique once, about a minute

`lowbit fit --ladder --memory 2GiB --out out/ladder` — with the largest model of each; it goes on after Ctrl-C

`lowbit fit --ladder --memory 8GiB --device cuda` — on a GPU

`lowbit fit --ladder --memory 300MiB --gpus 4 --quick` — a model shared over 2 and 4 processes, each under the limit
"""

_LADDER = "Climb the techniques of memory-efficient training one by one, each in a process with a real limit."
_MODEL = (
    "demo, a directory with a config.json of transformers, or MODULE:FUNCTION, which returns a model, a batch, and a "
    "loss of output and batch where it is not the model's own."
)
_MEMORY = "What a step may take: a size such as 2GiB, or of MODEL a share of plain training, such as 60%."
_REQUIRE = "What the plan must have, such as bf16, adamw8bit, block, memory; repeat."
_EXCLUDE = "What the plan must not have, such as disk; repeat."
_GPUS = "Processes that train together, each within the memory; of --ladder the most."
_LINK = "What a process sends to others a second, such as 25GB/s."

#: The options that serve some uses alone, by the names of their parameters.
_OF_MODEL = {"rows": "--rows", "length": "--length", "require": "--require", "exclude": "--exclude", "link": "--link"}
_OF_BATCH = {"rows": "--rows", "length": "--length"}
_OF_LADDER = {"search": "--search", "quick": "--quick", "device": "--device"}


def fit(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(help=_MODEL, show_default=False)] = None,
    memory: Annotated[str | None, typer.Option(help=_MEMORY, show_default="2GiB with --ladder")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch, of MODEL but MODULE:FUNCTION.")] = 8,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row, of MODEL but MODULE:FUNCTION.")] = 512,
    require: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_REQUIRE)] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_EXCLUDE)] = None,
    gpus: Annotated[int, typer.Option(min=1, help=_GPUS)] = 1,
    link: Annotated[str | None, typer.Option(help=_LINK, show_default="1.25GB/s, on GPUs 25GB/s")] = None,
    directory: Annotated[Path | None, typer.Option("--out", help="Where plan, report and finished runs go.")] = None,
    ladder: Annotated[bool, typer.Option("--ladder", help=_LADDER)] = False,
    search: Annotated[int, typer.Option(help="Models tried for the largest of a technique; 0: none.")] = 6,
    quick: Annotated[bool, typer.Option("--quick", help="Two steps each, and no search.")] = False,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Make a model fit: the fastest training within a budget; with --ladder, what each technique buys and costs."""
    if ladder:
        if model is not None:
            raise ValueError(f"lowbit fit --ladder climbs with models of its own, got {model!r}; leave one of them out")
        _refuse(context, _OF_MODEL, "is for lowbit fit MODEL, and --ladder has models of its own")
        _climb("2GiB" if memory is None else memory, gpus, directory, search, quick, device, json)
        return
    if model is None:
        raise ValueError(
            "lowbit fit expects a model and a budget, such as lowbit fit demo --memory 60%, or --ladder, such as "
            "lowbit fit --ladder --memory 2GiB; lowbit fit --help lists what there is"
        )
    _refuse(context, _OF_LADDER, "is for lowbit fit --ladder")
    if ":" in model and not is_directory(Path(model)):
        _refuse(context, _OF_BATCH, f"is of a batch that lowbit makes, and {model} makes its own")
    if memory is None:
        raise ValueError(
            f"lowbit fit {model} expects a budget: --memory 6GiB, or a share of plain training, --memory 60%"
        )
    asked: dict[str, Any] = {
        "require": tuple(require or ()), "exclude": tuple(exclude or ()), "gpus": gpus, "link": link,
    }  # fmt: skip
    with nullcontext() if directory is None else exclusive(directory, "lowbit fit --out"):
        _plan(model, memory, rows, length, {name: value for name, value in asked.items() if value}, directory, json)


fit.__doc__ = f"{fit.__doc__}\n{EPILOG}"


def _refuse(context: typer.Context, options: dict[str, str], why: str) -> None:
    """Raises ValueError where one of the options is given."""
    for name, option in options.items():
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{option} {why}; leave it out")


# -- a plan ------------------------------------------------------------------------------------------------------------
def _plan(
    name: str, memory: str, rows: int, length: int, asked: dict[str, Any], directory: Path | None, json: bool
) -> None:
    """Plan, print, and save where there is a directory."""
    budget_in(memory, "--memory")  # before a model is loaded or made
    model, batch, loss = find(name, rows, length, "MODEL")
    try:
        plan = plan_training(model, batch, memory, loss, progress=True, **asked)
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error
    made = Path("plan.json") if directory is None else directory / "plan.json"
    given = "" if loss is None else ", loss"
    code = "\n".join([*_model_lines(name, model, batch, given), *_plan_lines(memory, asked, directory and made, given)])
    if directory is not None:
        _save(plan, directory, f"{name} within {memory}", code)
    if json:
        print_json(plan.as_dict())
        return
    sections = ((f"{name} within {memory}", str(plan)), ("what else was to be had", plan.table()), ("apply it", code))
    for title, text in sections:
        out.print(title, style="bold")
        out.print(f"{text}\n", markup=False, soft_wrap=True)


def _model_lines(name: str, model: nn.Module, batch: Any, loss: str) -> list[str]:
    """Python that makes the model and the batch, and the ``loss``, ``", loss"`` where there is one."""
    if ":" in name:
        module, _, function = name.partition(":")
        return [
            "import lowbit as lb",
            f"from {module} import {function}",
            "",
            f"model, batch{', loss' if loss else ''} = {function}()",
        ]
    kind = type(model).__name__
    made = ("lowbit.demo.gpt", "GPT, GPTConfig", "GPT(GPTConfig())")
    if name != "demo":
        made = ("transformers", kind, f"{kind}.from_pretrained({name!r}, dtype='auto').train()")
    given = {key: f"torch.zeros{tuple(t.shape)}.to({t.dtype})" for key, t in _tensors(batch).items()}
    listed = given.get("") or "{" + ", ".join(f"{key!r}: {value}" for key, value in given.items()) + "}"
    return [
        "import torch", "import lowbit as lb", f"from {made[0]} import {made[1]}", "",
        f"model = {made[2]}", f"batch = {listed}  # of these shapes",
    ]  # fmt: skip


def _tensors(batch: Any) -> dict[str, Tensor]:
    """A batch as ``find`` makes one: the tensors by name, a single one under no name."""
    return batch if isinstance(batch, dict) else {"": batch}


def _plan_lines(memory: str, asked: dict[str, Any], made: Path | None, loss: str) -> list[str]:
    """Python that takes the plan, from its file where there is one, and trains by it."""
    chosen = "".join(f", {key}={value!r}" for key, value in asked.items() if (key, value) != ("gpus", 1))
    plan = (
        f"lb.fit(model, batch, {memory!r}{loss}{chosen})"
        if made is None
        else f"lb.plan.TrainingPlan.load({str(made)!r})"
    )
    count = asked["gpus"]
    start = [f"torch.distributed.init_process_group()  # torchrun --nproc-per-node {count}"] if count > 1 else []
    return [
        *start,
        f"plan = {plan}",
        f"run = plan.apply_(model{loss}, lr=1e-3)  # in place",
        "loss = run.step(batch)  # for each batch",
    ]


def _save(plan: TrainingPlan, directory: Path, title: str, code: str) -> None:
    """Write ``plan.json``, ``plan.md`` and, where matplotlib is installed, ``plan.png``."""
    plan.save(directory / "plan.json")
    plots = find_spec("matplotlib") is not None
    if plots:
        plan.plot(directory / "plan.png")
    else:
        errors.print(f"no plot, which needs matplotlib: {sys.executable} -m pip install matplotlib", soft_wrap=True)
    made = provenance(shlex.join(["lowbit", *sys.argv[1:]]), kernels=processor())
    lines = [
        f"# {title}", "", "```", str(plan), "```", "", "## What else was to be had", "",
        *(["![peaks and times to choose from](plan.png)", ""] if plots else []),
        "```", plan.table(), "```", "", "## Apply it", "", "```python", code, "```", "",
        "## How it was made", "", *(f"- {key}: {value}" for key, value in made.items()),
    ]  # fmt: skip
    write_atomically(directory / "plan.md", lambda file: file.write("\n".join(lines).encode() + b"\n"))
    errors.print(f"plan: {directory / 'plan.json'}", soft_wrap=True)


# -- the ladder --------------------------------------------------------------------------------------------------------
def _climb(memory: str, gpus: int, directory: Path | None, search: int, quick: bool, device: str, json: bool) -> None:
    if device not in LIMITS:
        raise ValueError(f"--device is one of {', '.join(LIMITS)}, got {device!r}")
    if search < 0:
        raise ValueError(f"--search is a number of models, got {search}; 0 searches for none")
    steps, tries = (2, 0) if quick else (3, search)
    limit = budget_in(memory, "--memory", shares=False).of(0)
    asked = Climb(limit, device, steps, tries, directory)
    with nullcontext() if directory is None else exclusive(directory, "lowbit fit --ladder --out"):
        with bar("climbing") as progress, resumable():
            climbed = climb(asked, rungs_of(gpus), progress)
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
