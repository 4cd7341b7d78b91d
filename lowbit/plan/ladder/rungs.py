"""The rungs: one row of ``RUNGS`` is a technique, as what it changes of ``Settings``. Each adds to those before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from lowbit.distributed.ways import WAYS
from lowbit.plan.settings import Settings

__all__ = ["RUNGS", "Rung", "rungs_of"]


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
    Rung("streaming", {"offload_states": True, "offload_weights": True},
         "Weights of blocks lie on disk (on a GPU: in host memory) while others compute, and gradients.", "equal"),
)  # fmt: skip


def rungs_of(gpus: int) -> tuple[Rung, ...]:
    """The rungs of a ladder of up to so many processes: of one, ``RUNGS``; of more, plain training and checkpointing,
    then ways to share the model, each process with the same batch, whose mean of gradients is that of one.

    Raises ValueError for a number that is no power of two: of others the mean rounds.
    """
    if gpus == 1:
        return RUNGS
    if gpus < 1 or gpus & (gpus - 1):
        raise ValueError(f"the ladder has 1, 2, 4, ... processes, whose means are exact, got {gpus}")
    ways = [(2, way) for way in ("zero1", "zero2", "zero3")]
    ways += [(1 << power, "zero3") for power in range(2, gpus.bit_length())]
    return (
        *RUNGS[:2],
        *(
            Rung(
                f"{way}, {count} processes",
                {"gpus": count, "way": way},
                f"{count} processes: {WAYS[way].about}.",
                "close",
            )
            for count, way in ways
        ),
    )
