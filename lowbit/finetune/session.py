"""Fine-tuning of a causal model of transformers: ``Session`` trains, measures held-out loss, saves and resumes.

Batches and learning rates are functions of the step, so a run that was stopped and resumed is bit-identical to one that
was not.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.combinations import refusal
from lowbit.convert import dequantize_
from lowbit.convert.engine import quantized_layers
from lowbit.dist_utils import processes
from lowbit.distributed import torchrun
from lowbit.distributed.checkpoint import saved
from lowbit.distributed.gather import gather_in_first
from lowbit.files import read_checked, write_checked
from lowbit.finetune.packing import IGNORED, Batch, Packed, Padded, Rows, keeps_documents_apart
from lowbit.finetune.texts import Document
from lowbit.interrupts import Interrupted, stop_on_signals
from lowbit.memory import rss
from lowbit.plan import TrainingPlan
from lowbit.plan.adapters import lora_config
from lowbit.plan.fitting.run import Run
from lowbit.plan.settings import TrainingSettings
from lowbit.tiled import attention_
from lowbit.tiled.causal_loss import losses_alone
from lowbit.train import convert_, prepare_, state, uncompress_activations_, unmixed_, watch
from lowbit.user_warnings import warn

__all__ = [
    "FLOATS", "SHARED_STATE", "STATE", "History", "Session", "TuneConfig", "add_adapters", "check_pairs", "first_batch",
    "held_out_loss", "settings_of",
]  # fmt: skip

#: File name of a run's state, and directory name of the state of a run on several processes.
STATE, SHARED_STATE = "checkpoint.pt", "checkpoint"

#: Precisions that are not recipes.
FLOATS = ("fp32", "bf16")

#: Settings that do not combine with a plan, and with several processes, with their reasons in ``COMBINATIONS``.
_UNPLANNED = {"tail": "tail memory", "watch": "watch memory"}
_UNSHARED = {"tail": "tail strategy", "watch": "watch strategy"}


@dataclass(frozen=True)
class TuneConfig:
    """A fine-tuning run.

    Attributes:
        steps: Optimizer steps.
        rows: Rows per step.
        length: Tokens per row.
        lr: Peak learning rate; None: 2e-4 for adapters, 2e-5 for all weights.
        warmup: Steps of linear warm-up; the rate then falls as a cosine to a tenth.
        weight_decay: Decay of matrices.
        clip: Largest norm of all gradients.
        seed: Seed of the order of documents and of adapters.
        adapters: Rank of LoRA adapters; 0 trains all weights.
        eval_every: Steps between measurements of the held-out loss.
        eval_rows: The most held-out rows.
        save_every: Steps between saved states.
        precision: ``fp32``, ``bf16`` (mixed precision), or a training recipe such as ``fp8``; None: fp32, or with a
            plan its choice.
        outside: Precision outside of Linear layers in a run with a recipe and without a plan, and in the tail.
        tail: Fraction of the steps, at the end, that a run with a recipe computes in ``outside`` only.
        watch: Steps between measurements of quantization error in a run with a recipe; 0: none.
    """

    steps: int = 200
    rows: int = 4
    length: int = 512
    lr: float | None = None
    warmup: int = 10
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0
    adapters: int = 0
    eval_every: int = 50
    eval_rows: int = 32
    save_every: int = 100
    precision: str | None = None
    outside: str = "bf16"
    tail: float = 0.0
    watch: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "rows", "eval_every", "eval_rows", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.length < 2:
            raise ValueError(f"length must be at least 2, got {self.length}")
        if self.adapters < 0 or self.warmup < 0:
            raise ValueError(f"adapters and warmup must not be negative, got {self.adapters} and {self.warmup}")
        if not 0 < self.peak_lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if self.outside not in FLOATS:
            raise ValueError(f"outside must be one of {', '.join(FLOATS)}, got {self.outside!r}")
        if not 0 <= self.tail <= 1:
            raise ValueError(f"tail must be a fraction of the steps, from 0 to 1, got {self.tail}")
        if self.watch < 0:
            raise ValueError(f"watch must be a number of steps, 0 or more, got {self.watch}")
        if self.precision == "fp16":
            raise ValueError("precision must be fp32, bf16 or a training recipe, got fp16; bf16 needs no loss scaling")
        if self.recipe is not None:
            prepare_(nn.Sequential(nn.Linear(1, 1)), self.recipe)  # raises if the recipe cannot train
        for name in ("tail", "watch"):
            if getattr(self, name) and self.recipe is None:
                raise ValueError(
                    f"{name} needs a precision that is a training recipe, such as fp8, got {self.precision}"
                )

    @property
    def recipe(self) -> str | None:
        """The name of the recipe, or None."""
        return None if self.precision in (None, *FLOATS) else self.precision

    @property
    def tail_begins(self) -> int:
        """The first step of the tail; ``steps`` without a tail."""
        return self.steps - round(self.tail * self.steps)

    @property
    def peak_lr(self) -> float:
        return self.lr if self.lr is not None else 2e-4 if self.adapters else 2e-5

    def lr_at(self, step: int) -> float:
        """The learning rate of a step."""
        if step < self.warmup:
            return self.peak_lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.peak_lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


@dataclass
class History:
    """The progress of a run."""

    train: list[float] = field(default_factory=list)
    """Training loss of each step, in nats per token."""
    held_out: list[tuple[int, float]] = field(default_factory=list)
    """Held-out losses, as (finished steps, loss)."""
    seconds: float = 0.0
    peak_bytes: int = 0
    """The largest memory of the process until the last step."""


def add_adapters(model: nn.Module, rank: int, seed: int = 0) -> nn.Module:
    """A model of peft with LoRA adapters of ``rank`` on all Linears but the head; the base is frozen."""
    config = lora_config(rank)
    config.target_modules, config.task_type = "all-linear", "CAUSAL_LM"
    from peft import get_peft_model

    torch.manual_seed(seed)
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def settings_of(config: TuneConfig, strategy: str | None = None) -> TrainingSettings:
    """The settings of a run without a plan, on the processes of ``strategy``."""
    floats = config.outside if config.recipe is not None else config.precision
    return TrainingSettings(
        precision="bf16" if floats == "bf16" else None, recipe=config.recipe,
        gpus=1 if strategy is None else processes(), strategy=strategy or TrainingSettings.strategy,
    )  # fmt: skip


class Session:
    """A fine-tuning run.

    Args:
        model: A causal model of transformers, with adapters or without, prepared in place.
        train: Documents to train on.
        held_out: Documents for the held-out loss.
        config: The configuration.
        directory: Directory of the state and of offloaded tensors.
        plan: A plan for ``first_batch(model, train, config)``; None: plain training.
        strategy: Sharding strategy of ``lowbit.distributed``; each process trains on its share of every batch, and all
            processes save one state. None: one process, or the strategy of a plan for several.

    Raises:
        ValueError: Settings cannot be combined, or the processes do not divide the rows.
    """

    def __init__(
        self,
        model: Any,
        train: list[Document],
        held_out: list[Document],
        config: TuneConfig,
        directory: Path,
        plan: TrainingPlan | None = None,
        strategy: str | None = None,
    ) -> None:
        if plan is not None and plan.settings.gpus > 1:
            strategy = plan.settings.strategy
        check_pairs(config, planned=plan is not None, shared=strategy is not None)
        if config.recipe is not None and quantized_layers(model):
            raise ValueError(refusal("base recipe", "train"))
        self.config, self.plan, self.model = config, plan, model
        self.path = directory / (STATE if strategy is None else SHARED_STATE)
        self.together = torchrun.Together(strategy, config.rows, self.path)
        self.history, self.step = History(), 0
        model.config.use_cache = False
        cls = rows_of(model, train)
        if cls is Padded:
            warn(f"{type(model).__name__} does not keep packed documents apart; each row has one document, and padding")
        self.rows: Rows = cls(train, config.length, config.seed)
        self.held_out = cls(held_out, config.length).all()
        options: dict[str, Any] = {"lr": config.peak_lr, "weight_decay": config.weight_decay}
        with self._waiting("the broadcast of parameters"):
            if plan is None:
                self.run = Run(model, settings_of(config, strategy), None, directory, options)
            else:
                self.run = plan.apply_(model, directory=directory, **options)
        if strategy is not None and self.run.settings.recipe is not None:
            state(model).attach(self.run.optimizer)  # processes exchange their magnitudes
        self.watch = watch(model, config.watch) if config.watch else None
        self._in_tail = False
        if not self.run.settings.offload_weights:  # otherwise no moment has all gradients
            self.run.optimizer.register_step_pre_hook(self._clip)

    @property
    def saved(self) -> bool:
        """Whether there is a saved state; the same in every process."""
        return torchrun.first(lambda: saved(self.path), "whether there is a state")

    def train(self, on_step: Callable[[Session], None] = lambda _: None) -> History:
        """Train until ``config.steps``, and call ``on_step`` after each step.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived in any process; the state is saved.
            FloatingPointError: A loss is not finite.
        """
        config = self.config
        if self.step == 0:
            torch.manual_seed(config.seed)
            self._evaluate()
        with stop_on_signals() as stopped:
            while self.step < config.steps:
                self._train_step()
                if self.step % config.eval_every == 0 or self.step == config.steps:
                    self._evaluate()
                on_step(self)
                stop = self.together.anywhere(stopped(), self.step)
                if stop or self.step % config.save_every == 0 or self.step == config.steps:
                    self.save()
                if stop:
                    raise Interrupted(self.step, self.path)
        return self.history

    @property
    def tokens_per_second(self) -> float:
        config = self.config
        return self.step * config.rows * config.length / max(self.history.seconds, 1e-9)

    def _waiting(self, collective: str) -> AbstractContextManager[None]:
        return self.together.waiting(collective, self.step)

    def _begin_tail(self) -> None:
        """Remove the recipe: later steps compute in ``config.outside`` only."""
        if self._in_tail:
            return
        self._in_tail = True
        if self.watch is not None:
            self.watch.close()
        convert_(self.model)

    def _train_step(self) -> None:
        start = time.perf_counter()
        if self.step >= self.config.tail_begins:
            self._begin_tail()
        for group in self.run.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        rows = self.rows.batch(self.step, self.config.rows)
        with self._waiting("the collectives"):
            mine = self.run.step(_on(self.model, {name: values[self.together.share] for name, values in rows.items()}))
        loss = self.together.mean(mine, self.step)
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss at step {self.step} is {loss}; lower --lr {self.config.peak_lr:g}, or plan without 16-bit "
                f"arithmetic"
            )
        self.history.train.append(loss)
        self.step += 1
        self.history.seconds += time.perf_counter() - start
        self.history.peak_bytes = rss.peak_bytes()

    def _clip(self, *_: Any) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)

    def _evaluate(self) -> None:
        """Append the held-out loss, of the rows of a micro-batch at a time; every process measures all rows."""
        size = -(-len(range(self.config.rows)[self.together.share]) // self.run.settings.micro_batches)
        with self._waiting(self.together.waits.forward):
            loss = held_out_loss(self.model, self.held_out, self.config.eval_rows, size)
        self.history.held_out.append((self.step, loss))

    # -- files ---------------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the state; the previous one stays intact until the new one is complete."""
        if self.together.strategy is not None:
            self.together.save(self.run.model, self.run.optimizer, **self._values())
            return
        values = {
            **self._values(), "model": self._trained(), "optimizer": self.run.optimizer.state_dict(),
            "random": torch.get_rng_state(), "watch": None if self.watch is None else self.watch.state_dict(),
        }  # fmt: skip
        write_checked(self.path, lambda file: torch.save(values, file))

    def _values(self) -> dict[str, Any]:
        """The values of a state that are not tensors."""
        return {
            "config": asdict(self.config), "text": self.rows.fingerprint, "step": self.step,
            "history": asdict(self.history),
        }  # fmt: skip

    def load(self) -> None:
        """Continue from the saved state; with the same number of processes the run continues bit-identically.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is damaged, or of another run.
        """
        if not self.saved:
            raise FileNotFoundError(f"nothing to resume: {self.path} does not exist; run without --resume first")
        if self.together.strategy is not None:
            self._continue(self.together.load(self.run.model, self.run.optimizer, self._check))
            return
        values = torch.load(io.BytesIO(read_checked(self.path)), weights_only=True)
        self._check(values)
        if values["step"] > self.config.tail_begins:
            self._begin_tail()
        self.model.load_state_dict(values["model"], strict=False)
        self.run.optimizer.load_state_dict(values["optimizer"])
        torch.set_rng_state(values["random"])
        if self.watch is not None and values["watch"] is not None:
            self.watch.load_state_dict(values["watch"])
        self._continue(values)

    def _check(self, values: dict[str, Any]) -> None:
        """Raise ValueError for the state of another run."""
        old, new = {**asdict(TuneConfig()), **values["config"]}, asdict(self.config)
        changed = [f"{key} {old[key]} -> {new[key]}" for key in new if old[key] != new[key]]
        if changed or values["text"] != self.rows.fingerprint:
            what = ", ".join(changed) or "its text has other tokens"
            raise ValueError(f"{self.path} is of another run ({what}); resume with the same settings")

    def _continue(self, values: dict[str, Any]) -> None:
        self.step, self.history = values["step"], History(**values["history"])
        self.history.held_out = [(step, loss) for step, loss in self.history.held_out]

    def _trained(self) -> dict[str, Tensor]:
        """The tensors that training changes."""
        frozen = {name for name, value in self.model.named_parameters() if not value.requires_grad}
        return {name: value for name, value in self.model.state_dict().items() if name not in frozen}

    def write_model(self, directory: Path, tokenizer: Any, adapter: Path | None = None) -> None:
        """Write the trained model, with merged adapters, and its tokenizer, for ``from_pretrained``.

        All processes call it, and the first one writes. The run cannot train on.

        Args:
            directory: Directory of the model.
            tokenizer: Its tokenizer.
            adapter: Directory for peft's files of the adapters; None: they are only merged.
        """
        model = self.model
        if self.together.strategy is not None:
            with self._waiting("the all-gather of the trained weights"):
                gather_in_first(model, self.run.optimizer)
            if torchrun.rank() > 0:
                return
        if self.run.settings.precision is not None:
            unmixed_(model, self.run.optimizer)
        if self.run.settings.activation_codes:
            uncompress_activations_(model)
        if self.run.settings.recipe is not None:
            convert_(model)
        if adapter is not None:
            model.save_pretrained(adapter)
        if self.config.adapters:
            if quantized_layers(model):
                dequantize_(model)
            model = model.merge_and_unload()
        model.config.use_cache = True
        model.eval().save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def check_pairs(config: TuneConfig, *, planned: bool, shared: bool) -> None:
    """Raise ValueError for settings that cannot be combined with a plan, or with several processes."""
    for pairs, is_there in ((_UNPLANNED, planned), (_UNSHARED, shared)):
        for name, pair in pairs.items() if is_there else ():
            if getattr(config, name):
                raise ValueError(refusal(pair, "train"))


@torch.no_grad()
def held_out_loss(model: Any, rows: Batch, most: int, size: int) -> float:
    """The mean loss per token of at most ``most`` rows, evenly spaced, in nats.

    Args:
        model: A causal model of transformers. It is in training mode afterwards.
        rows: The rows.
        most: The most rows.
        size: Rows of a forward pass.

    Raises:
        ValueError: No token is trained on.
    """
    count = min(most, len(rows["input_ids"]))
    chosen = torch.linspace(0, len(rows["input_ids"]) - 1, count).round().long()
    total, tokens = 0.0, 0
    model.eval()
    with losses_alone(model):
        for index in chosen.split(size):
            part = {name: values[index] for name, values in rows.items()}
            number = int((part["labels"][:, 1:] != IGNORED).sum())
            if number:
                total += float(model(**_on(model, part)).loss) * number
                tokens += number
    model.train()
    if not tokens:
        raise ValueError("no held-out token is trained on; give more documents, or --held-out FILE")
    return total / tokens


def rows_of(model: Any, documents: list[Document]) -> type[Packed] | type[Padded]:
    """The class of rows: packed if the model keeps documents apart, or if there is one.

    A model that keeps several apart gets ``lb.memory.attention_``, in place, if it supports that: attention then needs
    no mask for them.
    """
    vocab = int(model.config.get_text_config().vocab_size)
    if len(documents) == 1:
        return Packed
    if not keeps_documents_apart(model, vocab):
        return Padded
    with suppress(ValueError):  # its attention is no choice of the config
        attention_(model)
    return Packed


def first_batch(model: Any, documents: list[Document], config: TuneConfig) -> Batch:
    """The batch that a plan is made for: this process's rows of the first step."""
    model.config.use_cache = False
    batch = rows_of(model, documents)(documents, config.length, config.seed).batch(0, config.rows)
    share = torchrun.share(config.rows)
    return _on(model, {name: values[share] for name, values in batch.items()})


def _on(model: nn.Module, batch: Batch) -> Batch:
    device = next(model.parameters()).device
    return {name: values.to(device) for name, values in batch.items()}
