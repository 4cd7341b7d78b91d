"""``lb.estimate``: the memory and the time of a step of training, by the techniques that it trains with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpointing.apply import checkpoint_
from lowbit.memory.estimator import Accumulate, Estimate, MakeOptimizer, estimate_step
from lowbit.optim.names import find_optimizer
from lowbit.recipes import Recipe
from lowbit.train import mixed_, prepare_
from lowbit.train.mixed import PRECISIONS

__all__ = ["estimate"]


def estimate(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    optimizer: str | MakeOptimizer | None = "adamw",
    checkpoint: Any = None,
    *,
    precision: str | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
    micro_batches: int = 1,
    device: torch.device | str | None = None,
    accumulate: Accumulate | None = None,
) -> Estimate:
    """The memory of a step of training ``model`` on ``batch``, in bytes of the allocator, and its time.

    Nothing is computed and ``model`` stays as it is; it may be on the meta device. The result has ``peak_bytes``,
    ``peak_event``, ``by_kind``, ``by_layer``, ``by_phase``, ``timeline`` and ``seconds`` of the second step, in which
    states of optimizers exist from the start. ``print`` shows a table.

    The model's output is released before backward, as in ``run.step`` and ``model(**batch).loss.backward()``: a loop
    that keeps it in a variable until then holds so much more. A process holds its libraries besides, and on CUDA a
    context and fragmentation.

    A kernel's own allocations are measured: an op that is not known yet runs once on made-up tensors of its shapes and
    strides (``lowbit.memory.footprint``). Of a model on meta, of an absent device and of ops too large to run they come
    from a table, and ``unmeasured`` names these ops. Gradients are on within, whatever the mode outside is.

    Args:
        model: Any module with parameters that require gradients.
        batch: A tensor, a tuple of arguments or a dict of keyword arguments, real or on meta. Its shapes count, and
            values of whole numbers and masks that the forward looks at.
        loss: ``loss(output, batch)``, a scalar. By default ``lb.memory.usual_loss``.
        recipe: Of ``lb.train.prepare_``.
        optimizer: A name (``"adamw"``, ``"adamw8bit"``), a function that makes one of parameters, or None for no step.
        checkpoint: A policy of ``lb.memory.checkpoint_``.
        precision: ``"bf16"`` or ``"fp16"``, as of ``lb.train.mixed_``.
        prepare: ``prepare(model)``, called on the copy last, for other changes.
        micro_batches: So many of ``batch`` are accumulated before the optimizer's step.
        device: The device of the training; by default the parameters', and ``cpu`` for those on meta.
        accumulate: ``accumulate(model, batch, loss)`` in place of forward and backward.

    Raises:
        ValueError: For a forward that reads values of tensors, as data-dependent routing does (profile a real step
            instead); for a model that is wrapped, sharded or streamed (see "What cannot be combined" in
            docs/memory.md), and one that cannot be copied.
        TypeError: For what is no module, no batch and no function.
    """
    _check(loss, optimizer, precision, prepare, micro_batches)

    def prepared(copied: nn.Module) -> None:
        if recipe is not None:
            prepare_(copied, recipe)
        if precision in PRECISIONS:
            mixed_(copied, precision)
        if checkpoint is not None:
            checkpoint_(copied, checkpoint)
        if prepare is not None:
            prepare(copied)

    return estimate_step(
        model,
        batch,
        loss,
        optimizer=find_optimizer(optimizer).make if isinstance(optimizer, str) else optimizer,
        prepare=prepared,
        micro_batches=micro_batches,
        device=device,
        accumulate=accumulate,
    )


def _check(loss: Any, optimizer: Any, precision: Any, prepare: Any, micro_batches: Any) -> None:
    """Raises TypeError and ValueError for what is no setting of an estimate."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"estimate: micro_batches is a whole number from 1, got {micro_batches!r}")
    if precision not in (None, "fp32", *PRECISIONS):
        raise ValueError(f"estimate: precision is fp32, {', '.join(PRECISIONS)} or None, got {precision!r}")
    expected = {
        "loss": (loss, "a function of output and batch"),
        "optimizer": (optimizer, "a name or what makes one of parameters, such as its class"),
        "prepare": (prepare, "a function of the model"),
    }
    for name, (value, what) in expected.items():
        named = name == "optimizer" and isinstance(value, str)
        if value is not None and not callable(value) and not named:
            raise TypeError(f"estimate: {name} is {what}, or None, got {type(value).__name__}")
