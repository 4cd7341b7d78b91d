"""Where training in each precision and recipe ends, beside bf16: the demo's GPT, and one of ten million parameters.

``lowbit bench convergence`` writes convergence.md. Runs are kept one file each below ``convergence/`` beside it; a run
whose file is there is not repeated, and one that was stopped goes on where it was. All of them take hours:
``lowbit bench convergence --only "demo mxfp8 seed 0"`` trains what the regular expression matches, and reports all that
is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lowbit import recipes
from lowbit.bench import runs
from lowbit.demo.data import Corpus
from lowbit.demo.gpt import GPT, GPTConfig
from lowbit.demo.loop import FLOATS, TrainConfig, Trainer
from lowbit.machine import provenance
from lowbit.recipes import Cast, Gemm, Recipe

__all__ = ["run"]


@dataclass(frozen=True)
class Size:
    """A model, how long it is trained, and with which seeds. ``rate`` is the highest learning rate."""

    name: str
    model: GPTConfig
    steps: int
    batch: int
    rate: float
    seeds: tuple[int, ...]


DEMO = Size("demo", GPTConfig(), steps=1500, batch=4, rate=5e-3, seeds=(0, 1, 2))
TEN_MILLION = Size("10m", GPTConfig(layers=6, heads=6, dim=384, hidden=1024), steps=500, batch=4, rate=2e-3, seeds=(0,))


@dataclass(frozen=True)
class Run:
    """A precision or recipe; ``group``: the table that shows it. ``settings``: of the training, besides."""

    name: str
    recipe: str | Recipe
    group: str = "recipes"
    settings: tuple[tuple[str, Any], ...] = ()


def _mx(rounding: str) -> Recipe:
    """``mxfp8`` with scales rounded otherwise."""
    kind, across = f"mxfp8:{rounding}", f"mxfp8:{rounding}:T"
    backward = Gemm(kind, across, save="operand"), Gemm(across, across, save="operand")
    return Recipe(Gemm(kind, kind), *backward, name=f"mxfp8-{rounding}")


def _gradients(name: str, **changes: Any) -> Recipe:
    """A recipe whose gradients are cast otherwise."""
    base = recipes.recipe(name)
    changed = {}
    for role in ("grad_input", "grad_weight"):
        gemm = getattr(base, role)
        b = replace(gemm.b, transform=None) if "transform" in changes and isinstance(gemm.b, Cast) else gemm.b
        changed[role] = Gemm(replace(gemm.a, **_of(changes, gemm.a)), b, gemm.save)
    words = "-".join(f"{key}-{value}" for key, value in changes.items()).lower()
    return replace(base, **changed, name=f"{base.name.split(':')[0]}-{words}")


def _of(changes: dict[str, Any], cast: Cast) -> dict[str, Any]:
    """The same changes to one cast: a rounding of scales is a word of its scheme."""
    rest = {key: value for key, value in changes.items() if key != "scales"}
    if "scales" in changes:
        rest["scheme"] = cast.scheme.name.replace(":ceil", f":{changes['scales']}")
    return rest


def _narrow_weights() -> Recipe:
    """``nvfp4`` with weights in blocks of one row, which backward quantizes along its own axis."""
    base = recipes.recipe("nvfp4:ends=0")
    assert base.grad_input is not None
    grad_input = Gemm(base.grad_input.a, "nvfp4:T", save="operand")
    return replace(base, forward=Gemm("nvfp4:global_row", "nvfp4"), grad_input=grad_input, name="nvfp4-1d")


#: The first is what the others are compared with.
RUNS = (
    Run("bf16", "bf16"),
    Run("fp32", "fp32"),
    Run("fp8", "fp8"),
    Run("fp8-tensor", "fp8-tensor"),
    Run("fp8-delayed", "fp8-delayed"),
    Run("fp8-pow2", "fp8-pow2"),
    Run("fp8-block", "fp8-block"),
    Run("mxfp8", "mxfp8"),
    Run("int8", "int8"),
    Run("int8-stochastic", "int8-stochastic"),
    Run("nvfp4", "nvfp4"),
    Run("nvfp4, all blocks", "nvfp4:ends=0"),
    Run("nvfp4-eden, all blocks", "nvfp4-eden:ends=0"),
    Run("mxfp4", "mxfp4"),
    Run("mxfp8, scales rounded down", _mx("floor"), "changed"),
    Run("fp8, stochastic gradients", _gradients("fp8", rounding="stochastic"), "changed"),
    Run("fp8, gradients in E4M3", "fp8:gradients=e4m3", "changed"),
    Run("fp8, weight gradients high", "fp8:grad_weight=high", "changed"),
    Run("fp8, compressed activations", "fp8", "changed", (("compress_activations", True),)),
    Run("nvfp4, all blocks, bf16 in the last tenth", "nvfp4:ends=0", "changed", (("tail", 0.1),)),
    Run("nvfp4, all blocks, nearest gradients", _gradients("nvfp4:ends=0", rounding="nearest"), "changed"),
    Run("nvfp4, all blocks, nearest scales", _gradients("nvfp4:ends=0", scales="nearest"), "changed"),
    Run("nvfp4, all blocks, no Hadamard", _gradients("nvfp4:ends=0", transform=None), "changed"),
    Run("nvfp4, all blocks, 1-D weights", _narrow_weights(), "changed"),
    Run("nvfp4, all blocks, four over six", "nvfp4:ends=0:rule=four-over-six", "changed"),
    Run("nvfp4, all blocks, searched scales", "nvfp4:ends=0:rule=search", "changed"),
    Run("nvfp4-eden, all blocks, searched scales", "nvfp4-eden:ends=0:rule=search", "changed"),
)
#: What the larger model is trained in.
LARGE = ("bf16", "fp8", "mxfp8", "int8", "nvfp4")


def _about(run: Run, size: Size, seed: int) -> dict[str, Any]:
    """What decides the bits of a run; recipes by what they do, so that a changed one is trained again."""
    kind = run.recipe if run.recipe in FLOATS else recipes.recipe(run.recipe).to_dict()
    shape = {key: value for key, value in asdict(size).items() if key not in ("name", "seeds")}
    return {"run": run.name, "precision": kind, **dict(run.settings), **shape, "seed": seed}


def _loss(run: Run, size: Size, seed: int, directory: Path, train: bool) -> float | None:
    """Held-out loss at the end; None: it is not there, or is not finite."""
    path, about = directory / size.name / runs.file_name(run.name, seed), _about(run, size, seed)
    if not train and not runs.there(path, about):
        return None

    def make(corpus: Corpus, scratch: Path) -> Trainer:
        name = run.recipe if isinstance(run.recipe, str) else run.recipe.name
        if isinstance(run.recipe, Recipe) and name not in recipes.RECIPES:
            recipes.register_recipe(run.recipe)
        config = TrainConfig(
            precision=name, steps=size.steps, batch=size.batch, lr=size.rate, warmup=size.steps // 10, seed=seed,
            eval_every=250, **dict(run.settings),
        )  # fmt: skip
        return Trainer(GPT(size.model, seed=seed), corpus, config, scratch)

    path.parent.mkdir(parents=True, exist_ok=True)
    loss: float | None = runs.trained(path, about, size.model.vocab, make)["held_out"][-1][1]
    return loss


def _rows(
    size: Size, chosen: Sequence[Run], directory: Path, only: re.Pattern[str]
) -> Iterator[tuple[str, list[float | None]]]:
    for row in chosen:
        wanted = [only.search(f"{size.name} {row.name} seed {seed}") is not None for seed in size.seeds]
        pairs = zip(size.seeds, wanted, strict=True)
        yield row.name, [_loss(row, size, seed, directory, train) for seed, train in pairs]


def _section(size: Size, chosen: Sequence[Run], directory: Path, only: re.Pattern[str]) -> str:
    tokens = size.steps * size.batch * size.model.context
    parameters = sum(p.numel() for p in GPT(size.model).parameters())
    rows = [row for row in _rows(size, chosen, directory, only) if any(loss is not None for loss in row[1])]
    about = (
        f"{parameters / 1e6:.1f} million parameters, {size.steps:,} steps of {size.batch} x {size.model.context} "
        f"tokens: {tokens / parameters:.2f} tokens a parameter.\n"
    )
    return f"{about}\n{runs.losses_table(rows, size.seeds)}" if rows else about


def run(directory: Path, only: str = "") -> Path:
    """Train what is not there yet and matches ``only``, and write ``convergence.md``."""
    wanted, cells = re.compile(only), directory / "convergence"
    large = [row for row in RUNS if row.name in LARGE]
    text = [
        "# Where training ends\n",
        *(f"- {name}: {value}" for name, value in provenance().items()),
        "\nHeld-out loss in nats a token, in the run's own precision; AdamW with states in fp32, outside Linear layers "
        "bf16 autocast. Changes are from bf16, standard deviations those of bf16 over its seeds.\n",
        "## The demo's GPT\n",
        _section(DEMO, [row for row in RUNS if row.group == "recipes"], cells, wanted),
        "\nWith something changed:\n",
        _section(DEMO, [RUNS[0], *(row for row in RUNS if row.group == "changed")], cells, wanted),
        "\n## Ten million parameters\n",
        _section(TEN_MILLION, large, cells, wanted),
    ]
    path = directory / "convergence.md"
    path.write_text("\n".join(text) + "\n")
    return path
