"""The rungs: one row of ``RUNGS`` is a technique, as what it changes of ``Settings``. Each adds to those before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowbit.plan.settings import Settings

__all__ = ["RUNGS", "Rung"]


@dataclass(frozen=True)
class Rung:
    """A technique: what it ``changes`` of the settings, and a sentence on it.

    ``losses``: what they are beside those of the rung below: ``"equal"`` in every bit, ``"close"`` (another order of
    sums), or ``"own"`` (another arithmetic).
    """

    name: str
    changes: Mapping[str, Any]
    about: str
    losses: Literal["equal", "close", "own"] = "own"

    def on(self, below: Settings) -> Settings:
        """The settings of this rung on top of those ``below``."""
        return replace(below, **self.changes)


RUNGS = (
    Rung("fp32", {}, "Weights, gradients, two states of Adam and all activations in fp32."),
    Rung("checkpointing", {"checkpoint": "block"},
         "Backward has each block's input alone, and computes its inside again.", "equal"),
    Rung("bf16", {"mixed": "bf16"},
         "Products and their weights in bf16; 8 more bits of each weight stay beside it for the optimizer."),
    Rung("8-bit AdamW", {"bits": 8}, "Both states of Adam as 8-bit codes with a scale a block."),
    Rung("fp8", {"recipe": "fp8", "compress": True},
         "Feed-forward layers multiply FP8 codes, and norms and GELU keep FP8 codes for backward."),
    Rung("offload", {"offload_states": True, "offload_activations": True},
         "States of the optimizer and inputs of blocks lie on disk (on a GPU: in host memory) until they are needed.",
         "equal"),
    Rung("micro-batches", {"micro": 4},
         "A batch in four parts, whose gradients add up: a quarter of the activations at a time.", "close"),
)  # fmt: skip
