"""Training configuration of a demo run; a resumed run must have the same one."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lowbit.demo.optimizers import find

__all__ = ["FLOATS", "OUTSIDE", "TrainConfig"]

#: Precisions for parts without a recipe: in training, and in the quantized models.
OUTSIDE = ("fp32", "bf16")

#: Precisions that are not recipes.
FLOATS = (*OUTSIDE, "fp16")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Training configuration of a run.

    Attributes:
        precision: ``fp32``, ``bf16``, ``fp16`` (the latter two as mixed precision) or a recipe such as ``fp8``.
        outside: Precision outside of Linear layers in a run with a recipe, ``bf16`` or ``fp32``.
        optimizer: A name in ``lowbit.optim.names``.
        lr, weight_decay: Values for AdamW; other optimizers scale them.
        warmup: Steps of linear warm-up.
        final_lr: Learning rate at the end, as a fraction of ``lr``.
        clip: Largest norm of gradients.
        checkpointing: Save only the inputs of blocks, and recompute the blocks in backward.
        compress_activations: Save the inputs of norms and activation functions for backward in FP8.
        tail: Fraction of the steps, at the end, that a run with a recipe computes in ``outside`` only.
    """

    precision: str = "bf16"
    outside: str = "bf16"
    optimizer: str = "adamw"
    steps: int = 450
    batch: int = 4
    context: int = 256
    lr: float = 5e-3
    warmup: int = 60
    final_lr: float = 0.05
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    checkpointing: bool = False
    compress_activations: bool = False
    tail: float = 0.0
    eval_every: int = 50
    eval_windows: int = 48
    save_every: int = 100

    def __post_init__(self) -> None:
        for row in fields(self):
            value, cls = getattr(self, row.name), type(row.default)
            if type(value) is not cls and not (cls is float and type(value) is int):
                raise TypeError(f"{row.name} must be of type {cls.__name__}, got {value!r}")
        for name in ("steps", "batch", "context", "lr", "clip", "eval_every", "eval_windows", "save_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        if not 0 <= self.tail <= 1:
            raise ValueError(f"tail must be a fraction of the steps, from 0 to 1, got {self.tail}")
        find(self.optimizer)
        if self.outside not in OUTSIDE:
            raise ValueError(f"outside must be one of {', '.join(OUTSIDE)}, got {self.outside!r}")

    @property
    def recipe(self) -> str | None:
        """The name of the recipe, or None."""
        return None if self.precision in FLOATS else self.precision

    @property
    def floats(self) -> str:
        """The precision of parts without a recipe."""
        return self.precision if self.recipe is None else self.outside

    @property
    def tail_begins(self) -> int:
        """The first step of the tail; ``steps`` without a tail."""
        return self.steps - (0 if self.recipe is None else round(self.tail * self.steps))

    def lr_at(self, step: int) -> float:
        """The learning rate: linear warm-up to ``lr``, then a cosine to ``final_lr * lr`` at the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * done)) / 2)
