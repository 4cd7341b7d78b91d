"""The rungs: one row of ``RUNGS`` is a technique, as what it changes of ``Settings``. Each adds to those before."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from lowbit import memory, optim
from lowbit.train import compress_activations_, mixed_, prepare_

__all__ = ["RUNGS", "Rung", "Settings", "arrange_", "elsewhere"]

#: The learning rate of every run.
_LR = 1e-3


@dataclass(frozen=True)
class Settings:
    """How a model trains; as it stands, in plain fp32 with torch's AdamW.

    ``checkpoint``: blocks are recomputed in backward. ``mixed``: the precision of products, whose matrices are then
    stored in it. ``bits``: of the optimizer's states, 32 or 8. ``recipe``: of the feed-forward layers. ``compress``:
    norms and activation functions keep codes for backward. ``offload``: states of the optimizer and what checkpoints
    keep lie elsewhere, on disk or beside a GPU. ``micro``: how many parts a batch is taken in.
    """

    checkpoint: bool = False
    mixed: str | None = None
    bits: int = 32
    recipe: str | None = None
    compress: bool = False
    offload: bool = False
    micro: int = 1


@dataclass(frozen=True)
class Rung:
    """A technique: what it ``changes`` of the settings, and a sentence on it.

    ``losses``: what they are beside those of the rung below: ``"equal"`` in every bit, ``"close"`` (another order of
    sums), or ``"own"`` (another arithmetic). ``needs``: functions of lowbit without which there is no such rung.
    """

    name: str
    changes: Mapping[str, Any]
    about: str
    losses: Literal["equal", "close", "own"] = "own"
    needs: tuple[tuple[ModuleType, str], ...] = ()

    def on(self, below: Settings) -> Settings:
        """The settings of this rung on top of those ``below``."""
        return replace(below, **self.changes)


_ROWS = (
    Rung("fp32", {}, "Weights, gradients, two states of Adam and all activations in fp32."),
    Rung("checkpointing", {"checkpoint": True},
         "Backward has each block's input alone, and computes its inside again.", "equal"),
    Rung("bf16", {"mixed": "bf16"},
         "Products and their weights in bf16; 8 more bits of each weight stay beside it for the optimizer."),
    Rung("8-bit AdamW", {"bits": 8}, "Both states of Adam as 8-bit codes with a scale a block."),
    Rung("fp8", {"recipe": "fp8", "compress": True},
         "Feed-forward layers multiply FP8 codes, and norms and GELU keep FP8 codes for backward."),
    Rung("offload", {"offload": True},
         "States of the optimizer and inputs of blocks lie on disk (on a GPU: in host memory) until they are needed.",
         "equal", needs=((memory, "offload_activations"), (optim, "offload_"))),
    Rung("micro-batches", {"micro": 4},
         "A batch in four parts, whose gradients add up: a quarter of the activations at a time.", "close"),
)  # fmt: skip

RUNGS = tuple(row for row in _ROWS if all(hasattr(module, name) for module, name in row.needs))


def arrange_(model: nn.Module, settings: Settings, where: str) -> torch.optim.Optimizer:
    """Make ``model`` train by ``settings``, in place, and make its optimizer; offload takes its states to ``where``."""
    if settings.checkpoint:
        memory.checkpoint_(model, "block")
    if settings.recipe is not None:
        # Codes of weights that serve all micro-batches would stay from forward to the optimizer's step.
        prepare_(model, settings.recipe, reuse_weights=False)
    if settings.compress:
        compress_activations_(model)
    if settings.mixed is not None:
        mixed_(model, settings.mixed, working_copies=True)
    optimizer = _optimizer(model, settings)
    if settings.offload:
        getattr(optim, "offload_")(optimizer, where)  # noqa: B009
    return optimizer


def _optimizer(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    if settings.mixed is not None:
        return optim.AdamW(model.parameters(), lr=_LR, bits=settings.bits, master="residual")
    if settings.bits == 32:
        return torch.optim.AdamW(model.parameters(), lr=_LR)
    return optim.AdamW(model.parameters(), lr=_LR, bits=settings.bits)


def elsewhere(settings: Settings, where: str) -> AbstractContextManager[Any]:
    """The context of forward and backward, in which offload keeps activations in ``where``."""
    if not settings.offload:
        return nullcontext()
    found: AbstractContextManager[Any] = getattr(memory, "offload_activations")(where)  # noqa: B009
    return found
