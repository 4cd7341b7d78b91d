"""The demo's experiment: train one GPT in several precisions, quantize it with every recipe, and measure each.

One directory has everything: ``settings.json``, ``PRECISION/checkpoint.pt`` (the state of each run), ``model/`` (the
trained model) and the report.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lowbit.combinations import refusal
from lowbit.convert import model_bytes, prepack_, quantize_
from lowbit.demo import optimizers, tokenizer
from lowbit.demo.config import FLOATS, OUTSIDE, TrainConfig
from lowbit.demo.data import Corpus
from lowbit.demo.explain import Held
from lowbit.demo.gpt import GPT, GPTConfig, generate
from lowbit.demo.loop import SHARED_STATE, STATE, Trainer
from lowbit.demo.step import evaluate
from lowbit.distributed import torchrun
from lowbit.distributed.checkpoint import remove
from lowbit.distributed.torchrun import STRATEGIES
from lowbit.files import read_json, shown, write_json
from lowbit.optim.shards import whole
from lowbit.plan import TrainingPlan
from lowbit.recipes import RECIPES
from lowbit.recipes import recipe as find_recipe
from lowbit.serialize import load_model, save_model
from lowbit.sizes import budget_in
from lowbit.train import prepare_

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["INFERENCE_RECIPES", "Measurement", "RunSettings", "measure_recipes", "trainers"]

#: The first recipe without static scales for each forward matmul: recipes that differ only in training deploy alike.
_DEPLOYED = {row.output: row for row in reversed(RECIPES.values()) if row.dynamic}

#: These recipes, and int4 with groups of 32, which is common in practice.
INFERENCE_RECIPES = tuple(
    name
    for row in RECIPES.values()
    if _DEPLOYED.get(row.output) is row
    for name in ([row.name, f"{row.name}:group32"] if row.name == "int4-weight-only" else [row.name])
)

#: Settings that do not combine with a plan, and settings that do not combine with a strategy, with their reasons in
#: ``COMBINATIONS``.
_UNPLANNED = {"checkpointing": "checkpointing memory", "tail": "tail memory", "watch": "watch memory"}
_UNSHARED = {
    "memory": "memory strategy",
    "tail": "tail strategy",
    "watch": "watch strategy",
    "profile_memory": "profile strategy",
}

PROMPT = "This module provides"
SAMPLE_TOKENS, TEMPERATURE = 120, 0.6
SPEED_TURNS, SPEED_TOKENS, WARM_UP_TOKENS = 40, 12, 2


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """All settings of a demo.

    Attributes:
        model: Shape of the GPT.
        train: Configuration of all runs; ``of`` sets precision and optimizer of each run.
        precisions: Precision of each run.
        recipes: Recipes to quantize the first run's model with.
        optimizer: Optimizer of all runs; None: AdamW, with 8-bit states for recipes.
        data: Path of a text file; None: Python's documentation.
        watch: Steps between measurements of quantization error in runs with recipes; 0: none.
        profile_memory: Whether to profile one step of each run.
        memory: Budget of a step, a size or a share of plain training, for which each run gets a plan; None: no plan.
        strategy: Sharding strategy of ``lowbit.distributed``; None: one process.

    Raises:
        ValueError: A name is unknown, a precision cannot train, or settings cannot be combined with ``memory`` or
            ``strategy``.
        TypeError: ``data`` or ``memory`` is not a string.
    """

    model: GPTConfig = field(default_factory=GPTConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    precisions: tuple[str, ...] = ("bf16", "fp8")
    recipes: tuple[str, ...] = INFERENCE_RECIPES
    optimizer: str | None = None
    data: str | None = None
    watch: int = 0
    profile_memory: bool = False
    memory: str | None = None
    strategy: str | None = None

    def __post_init__(self) -> None:
        if self.strategy is not None and self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {', '.join(STRATEGIES)}, got {shown(self.strategy)}")
        for name, pair in _UNSHARED.items() if self.strategy is not None else ():
            if getattr(self, name, None) or getattr(self.train, name, None):
                raise ValueError(refusal(pair, "train"))
        if not (self.data is None or isinstance(self.data, str)):
            raise TypeError(f"data must be a path or None, got {shown(self.data)}")
        if type(self.watch) is not int or self.watch < 0:
            raise ValueError(f"watch must be a number of steps, 0 or more, got {shown(self.watch)}")
        if not (self.memory is None or isinstance(self.memory, str)):
            raise TypeError(
                f"memory must be a size such as '1GiB', a share such as '60%', or None, got {shown(self.memory)}"
            )
        if self.memory is not None:
            budget_in(self.memory, "memory")
        for name, pair in _UNPLANNED.items() if self.memory is not None else ():
            if getattr(self, name, None) or getattr(self.train, name, None):
                raise ValueError(refusal(pair, "train"))
        if self.optimizer is not None:
            optimizers.find(self.optimizer)
        for name in self.recipes:
            find_recipe(name)
        for name in self.precisions:
            if name not in FLOATS:
                prepare_(nn.Sequential(nn.Linear(1, 1)), name)  # raises if the recipe cannot train

    def save(self, directory: Path) -> None:
        write_json(directory / "settings.json", asdict(self))

    @classmethod
    def load(cls, directory: Path) -> RunSettings:
        """The saved settings of a run.

        Raises:
            FileNotFoundError: There are none.
            ValueError: The file has other contents.
        """
        path = directory / "settings.json"
        if not path.exists():
            raise FileNotFoundError(f"nothing to resume: {path} does not exist; run without --resume first")
        try:
            saved = read_json(path)
            return cls(
                model=GPTConfig(**saved["model"]),
                train=TrainConfig(**saved["train"]),
                precisions=tuple(saved["precisions"]),
                recipes=tuple(saved["recipes"]),
                optimizer=saved["optimizer"],
                data=saved["data"],
                watch=saved["watch"],
                profile_memory=saved["profile_memory"],
                memory=saved.get("memory"),
                strategy=saved.get("strategy"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not what this lowbit train writes ({error}); move it away, or pass another --out"
            ) from None

    def corpus(self) -> Corpus:
        return Corpus.load(Path(self.data) if self.data else None, self.model.vocab)

    def of(self, precision: str, plan: TrainingPlan | None = None) -> TrainConfig:
        """The configuration of one run.

        Runs with recipes have 8-bit optimizer states, and compressed activations if ``train`` says so. A plan chooses
        the bits of the states itself.
        """
        has_recipe = precision not in FLOATS
        bits = (8 if has_recipe else 32) if plan is None else plan.settings.bits
        return replace(
            self.train,
            precision=precision,
            compress_activations=has_recipe and self.train.compress_activations,
            optimizer=self.optimizer or ("adamw" if bits == 32 else f"adamw{bits}bit"),
        )


def run_path(directory: Path, precision: str) -> Path:
    """The directory of a run, without colons, which some file systems and links do not support."""
    return directory / precision.replace(":", "+")


def state_paths(directory: Path, precision: str) -> tuple[Path, Path]:
    """The state file of a run on one process, and the state directory of a run on several processes."""
    return run_path(directory, precision) / STATE, run_path(directory, precision) / SHARED_STATE


def remove_state(directory: Path, precision: str) -> None:
    """Remove the state of a run."""
    file, shared = state_paths(directory, precision)
    file.unlink(missing_ok=True)
    remove(shared)


def model_of(settings: RunSettings, corpus: Corpus) -> GPT:
    """The initial model of every run."""
    return GPT(replace(settings.model, vocab=corpus.tokenizer.get_vocab_size()), seed=settings.train.seed)


def trainers(
    settings: RunSettings,
    corpus: Corpus,
    directory: Path,
    resume: bool,
    plans: Mapping[str, TrainingPlan] | None = None,
) -> Iterator[Trainer]:
    """Yield a trainer for each precision, with its plan if there is one; ``resume`` loads its state if there is one."""
    for precision in settings.precisions:
        plan = None if plans is None else plans[precision]
        trainer = Trainer(
            model_of(settings, corpus), corpus, settings.of(precision, plan), run_path(directory, precision),
            settings.watch, settings.profile_memory, plan, settings.strategy,
        )  # fmt: skip
        if resume and trainer.saved:
            trainer.load()
        yield trainer


def check(settings: RunSettings, corpus: Corpus, directory: Path) -> None:
    """Find errors before training and before anything is written.

    Raises:
        ValueError: The text is too short for the context, the context is too short for the sample, the batch does not
            divide among the processes, or a recipe cannot train the model.
    """
    context = settings.train.context
    if settings.strategy is not None:
        torchrun.share(settings.train.batch)
    for trainer in trainers(replace(settings, strategy=None), corpus, directory, resume=False):
        corpus.batch(0, 1, context, trainer.config.seed)
    needed = len(corpus.tokenizer.encode(PROMPT).ids) + WARM_UP_TOKENS + 1
    if context < needed:
        raise ValueError(f"a context of {context} is too short for the sample text; it must be {needed} or more")


def save(model: GPT, trained: Tokenizer, directory: Path) -> None:
    """Save the model and its tokenizer."""
    save_model(model, directory)
    tokenizer.save(trained, directory / "tokenizer.json")


def load(directory: Path) -> tuple[GPT, Tokenizer]:
    """Load model and tokenizer from the directory of ``save``.

    Raises:
        FileNotFoundError: There is no tokenizer, or no model.
        ValueError: The model is not a GPT, the tokenizer is of another model, or as for ``load_model``.
    """
    path = directory / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist; pass a model directory of lowbit train, such as out/demo/model"
        )
    model = load_model(directory)
    if not isinstance(model, GPT):
        raise ValueError(f"{directory} has a {type(model).__name__}, expected a GPT of lowbit train")
    bpe, vocab = tokenizer.load(path), model.config.vocab
    if any(token >= vocab for token in bpe.get_vocab().values()):
        raise ValueError(
            f"{path} has tokens beyond the model's {vocab}; copy the whole directory again, or train again"
        )
    return model.eval(), bpe


@dataclass(frozen=True)
class Measurement:
    """Measurements of the model with one recipe."""

    recipe: str
    linear_bytes: int
    """Bytes of the blocks."""
    bytes: int
    """Bytes of the whole model."""
    loss: float
    """Held-out loss, in nats per token."""
    tokens_per_second: float
    """Generation speed of one sequence."""
    sample: str
    """Generated text."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss)


def plain_copy(trained: GPT) -> GPT:
    """A GPT with plain Linear layers and the fp32 weights of ``trained``; if it is sharded, a collective call."""
    model = GPT(trained.config)
    with torchrun.waiting("the all-gather of the trained weights"):
        model.load_state_dict({name: whole(value).float() for name, value in trained.named_parameters()})
    return model.eval()


def measure_recipes(
    trained: GPT, corpus: Corpus, windows: torch.Tensor, settings: RunSettings, on_row: Callable[[str], None]
) -> list[Measurement]:
    """Measure the trained model in fp32, in bf16 and with each recipe; speeds are with packed layers if possible."""
    rows, models = [], {}
    for name in (*OUTSIDE, *settings.recipes):
        on_row(name)
        model = copy.deepcopy(trained)
        if name not in OUTSIDE:
            quantize_(model, name)
        plain = (name if name in OUTSIDE else settings.train.outside) == "fp32"
        models[name] = model if plain else model.bfloat16()
        rows.append(measure(name, models[name], corpus, windows))
    on_row("speed")
    for name, model in models.items():
        if name not in OUTSIDE:
            prepack_(model)
    speeds = generation_speeds(models, torch.tensor([corpus.tokenizer.encode(PROMPT).ids]))
    return [replace(row, tokens_per_second=speeds[row.recipe]) for row in rows]


def measure(name: str, model: GPT, corpus: Corpus, windows: torch.Tensor) -> Measurement:
    """All measurements except the speed."""
    loss = evaluate(model, windows)
    prompt = torch.tensor([corpus.tokenizer.encode(PROMPT).ids])
    count = min(SAMPLE_TOKENS, model.config.context - prompt.shape[1])
    tokens = [int(token) for token in generate(model, prompt, count, temperature=TEMPERATURE, seed=1)]
    sample = PROMPT + corpus.tokenizer.decode(tokens)
    return Measurement(name, model_bytes(model.blocks), model_bytes(model), loss, math.nan, sample)


def generation_speeds(models: dict[str, GPT], prompt: torch.Tensor) -> dict[str, float]:
    """Generated tokens per second of each model: medians of short interleaved turns, fair also on a busy machine."""
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(SPEED_TURNS):
        for name, model in models.items():
            count = min(WARM_UP_TOKENS + SPEED_TOKENS, model.config.context - prompt.shape[1])
            tokens = generate(model, prompt, count, temperature=TEMPERATURE, seed=1)
            for _ in range(WARM_UP_TOKENS):
                next(tokens)
            start = time.perf_counter()
            list(tokens)
            seconds[name].append((time.perf_counter() - start) / (count - WARM_UP_TOKENS))
    return {name: 1 / statistics.median(turns) for name, turns in seconds.items()}


def as_json(
    settings: RunSettings, corpus: Corpus, runs: list[Trainer], rows: list[Measurement], memory: list[Held]
) -> dict[str, Any]:
    """The numbers of the report, as JSON values."""
    return {
        "settings": asdict(settings),
        "corpus": {
            "origin": corpus.origin,
            "train_tokens": len(corpus.train),
            "held_out_tokens": len(corpus.held_out),
            "held_out_bytes": corpus.held_out_bytes,
        },
        "runs": {run.config.precision: asdict(run.history) for run in runs},
        "memory": [row.to_dict() for row in memory],
        "plans": {run.config.precision: run.plan.as_dict() for run in runs if run.plan is not None},
        "recipes": [{**asdict(row), "perplexity": row.perplexity} for row in rows],
    }
