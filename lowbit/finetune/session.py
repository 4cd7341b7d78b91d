"""Fine-tuning of a causal model of transformers: ``Session`` trains, measures held-out loss, saves and resumes.

Batches and learning rates are functions of the step, so a run that was stopped and resumed is bit-identical to one that
was not.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.convert import dequantize_
from lowbit.convert.engine import quantized_layers
from lowbit.files import read_checked, write_checked
from lowbit.finetune.packing import IGNORED, Batch, Packed, Padded, Rows, keeps_documents_apart
from lowbit.finetune.texts import Document
from lowbit.interrupts import Interrupted, stop_on_signals
from lowbit.memory import rss
from lowbit.plan import TrainingPlan
from lowbit.plan.adapters import lora_config
from lowbit.plan.fitting.run import Run
from lowbit.plan.settings import TrainingSettings
from lowbit.train import convert_, unmixed_
from lowbit.user_warnings import warn

__all__ = ["STATE", "History", "Session", "TuneConfig", "add_adapters", "first_batch", "held_out_loss"]

#: File name of a run's state.
STATE = "checkpoint.pt"


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


class Session:
    """A fine-tuning run.

    Args:
        model: A causal model of transformers, with adapters or without, prepared in place.
        train: Documents to train on.
        held_out: Documents for the held-out loss.
        config: The configuration.
        directory: Directory of the state and of offloaded tensors.
        plan: A plan for ``batch(model, train, config)``; None: plain training.
    """

    def __init__(
        self,
        model: Any,
        train: list[Document],
        held_out: list[Document],
        config: TuneConfig,
        directory: Path,
        plan: TrainingPlan | None = None,
    ) -> None:
        self.config, self.path, self.plan = config, directory / STATE, plan
        model.config.use_cache = False
        cls = rows_of(model, train)
        if cls is Padded:
            warn(f"{type(model).__name__} does not keep packed documents apart; each row has one document, and padding")
        self.rows: Rows = cls(train, config.length, config.seed)
        self.held_out = cls(held_out, config.length).all()
        options: dict[str, Any] = {"lr": config.peak_lr, "weight_decay": config.weight_decay}
        if plan is None:
            self.run = Run(model, TrainingSettings(), None, directory, options)
        else:
            self.run = plan.apply_(model, directory=directory, **options)
        self.model = model
        if not self.run.settings.offload_weights:  # otherwise no moment has all gradients
            self.run.optimizer.register_step_pre_hook(self._clip)
        self.history, self.step = History(), 0

    def train(self, on_step: Callable[[Session], None] = lambda _: None) -> History:
        """Train until ``config.steps``, and call ``on_step`` after each step.

        Raises:
            Interrupted: SIGINT or SIGTERM arrived; the state is saved.
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
                stop = stopped()
                if stop or self.step % config.save_every == 0 or self.step == config.steps:
                    self.save()
                if stop:
                    raise Interrupted(self.step, self.path)
        return self.history

    @property
    def tokens_per_second(self) -> float:
        config = self.config
        return self.step * config.rows * config.length / max(self.history.seconds, 1e-9)

    def _train_step(self) -> None:
        start = time.perf_counter()
        for group in self.run.optimizer.param_groups:
            group["lr"] = self.config.lr_at(self.step)
        loss = self.run.step(_on(self.model, self.rows.batch(self.step, self.config.rows)))
        if not math.isfinite(loss):
            raise FloatingPointError(
                f"the loss at step {self.step} is {loss}; lower --lr {self.config.peak_lr:g}, or plan without 16-bit "
                f"arithmetic"
            )
        self.history.train.append(loss)
        self.step += 1
        self.history.seconds += time.perf_counter() - start
        self.history.peak_bytes = rss.peak_bytes()

    def _clip(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, self.config.clip)

    def _evaluate(self) -> None:
        size = -(-self.config.rows // self.run.settings.micro_batches)
        loss = held_out_loss(self.model, self.held_out, self.config.eval_rows, size)
        self.history.held_out.append((self.step, loss))

    # -- files ---------------------------------------------------------------------------------------------------------
    def save(self) -> None:
        """Write the state; the previous file stays intact until the new one is complete."""
        payload = io.BytesIO()
        torch.save(
            {
                "config": asdict(self.config), "text": self.rows.fingerprint, "step": self.step,
                "history": asdict(self.history), "model": self._trained(),
                "optimizer": self.run.optimizer.state_dict(), "random": torch.get_rng_state(),
            },
            payload,
        )  # fmt: skip
        write_checked(self.path, payload.getvalue())

    def load(self) -> None:
        """Continue from the saved state.

        Raises:
            FileNotFoundError: There is none.
            ValueError: It is damaged, or of another run.
        """
        if not self.path.exists():
            raise FileNotFoundError(f"nothing to resume: {self.path} does not exist; run without --resume first")
        state = torch.load(io.BytesIO(read_checked(self.path)), weights_only=True)
        new = asdict(self.config)
        changed = [
            f"{key} {state['config'].get(key)} -> {new[key]}" for key in new if state["config"].get(key) != new[key]
        ]
        if changed or state["text"] != self.rows.fingerprint:
            what = ", ".join(changed) or "its text has other tokens"
            raise ValueError(f"{self.path} is of another run ({what}); resume with the same settings")
        self.model.load_state_dict(state["model"], strict=False)
        self.run.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        self.step, self.history = state["step"], History(**state["history"])

    def _trained(self) -> dict[str, Tensor]:
        """The tensors that training changes."""
        frozen = {name for name, value in self.model.named_parameters() if not value.requires_grad}
        return {name: value for name, value in self.model.state_dict().items() if name not in frozen}

    def write_model(self, directory: Path, tokenizer: Any) -> None:
        """Write the trained model, with merged adapters, and its tokenizer, for ``from_pretrained``."""
        model = self.model
        if self.run.settings.precision is not None:
            unmixed_(model, self.run.optimizer)
        if self.run.settings.recipe is not None:
            convert_(model)
        if self.config.adapters:
            if quantized_layers(model):
                dequantize_(model)
            model = model.merge_and_unload()
        model.config.use_cache = True
        model.eval().save_pretrained(directory)
        tokenizer.save_pretrained(directory)


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
    """The class of rows: packed if the model keeps documents apart, or if there is one."""
    vocab = int(model.config.get_text_config().vocab_size)
    return Packed if len(documents) == 1 or keeps_documents_apart(model, vocab) else Padded


def first_batch(model: Any, documents: list[Document], config: TuneConfig) -> Batch:
    """The batch that a plan is made for."""
    model.config.use_cache = False
    return _on(model, rows_of(model, documents)(documents, config.length, config.seed).batch(0, config.rows))


def _on(model: nn.Module, batch: Batch) -> Batch:
    device = next(model.parameters()).device
    return {name: values.to(device) for name, values in batch.items()}
