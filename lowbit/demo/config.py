"""How a run of the demo trains: one record, which a resumed run has to agree with."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from lowbit.demo.optimizers import find

__all__ = ["FLOATS", "OUTSIDE", "TrainConfig"]

#: What a recipe's run may compute in outside of its Linear layers, and a trained model be kept in.
OUTSIDE = ("fp32", "bf16")

#: Precisions that are no recipe.
FLOATS = (*OUTSIDE, "fp16")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train; ``precision`` is ``fp32``, ``bf16``, ``fp16`` (both mixed with fp32) or a recipe such as ``fp8``.

    ``outside``: what a recipe's run computes in outside its Linear layers, ``bf16`` or ``fp32``. ``optimizer``: a name
    of ``lowbit.optim.names``; ``lr`` and ``weight_decay`` are AdamW's, and others take their share of them.
    ``compress_activations``: norms and activation functions keep their inputs for backward as FP8 codes.
    ``checkpointing``: blocks keep their input alone, and backward computes them again. ``tail``: the share of the
    steps, the last ones, in which a recipe's run computes all in the floats of ``outside`` and keeps no codes.
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
            value, kind = getattr(self, row.name), type(row.default)
            if type(value) is not kind and not (kind is float and type(value) is int):
                raise TypeError(f"{row.name} must be of type {kind.__name__}, got {value!r}")
        for name in ("steps", "batch", "context", "lr", "clip", "eval_every", "eval_windows", "save_every"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed must be from 0 to 2^63 - 1, got {self.seed}")
        if not 0 <= self.tail <= 1:
            raise ValueError(f"tail is a share of the steps, from 0 to 1, got {self.tail}")
        find(self.optimizer)
        if self.outside not in OUTSIDE:
            raise ValueError(f"outside must be one of {', '.join(OUTSIDE)}, got {self.outside!r}")

    @property
    def recipe(self) -> str | None:
        """The recipe that ``precision`` names, if it is one."""
        return None if self.precision in FLOATS else self.precision

    @property
    def floats(self) -> str:
        """The precision of what no recipe computes."""
        return self.precision if self.recipe is None else self.outside

    @property
    def tail_begins(self) -> int:
        """The first step of the tail; ``steps`` where there is none."""
        return self.steps - (0 if self.recipe is None else round(self.tail * self.steps))

    def lr_at(self, step: int) -> float:
        """Linear warm-up to ``lr``, then a cosine down to ``final_lr * lr`` at the last step."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (self.final_lr + (1 - self.final_lr) * (1 + math.cos(math.pi * done)) / 2)
