"""``lb.estimate``: memory and time of a training step, without running it."""

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
    """Estimate the memory and the time of a step that trains ``model`` on ``batch``.

    The step runs on tensors without data, and ``model`` does not change. The estimate is of the second step, when the
    optimizer states already exist. Sizes are bytes of torch's allocator.

    Libraries, the CUDA context and fragmentation are not included. The model's output is assumed to be freed before
    backward, as in ``run.step`` and ``model(**batch).loss.backward()``. If a loop still has the output in a variable
    then, add its bytes.

    The allocations inside kernels are measured: a new op runs once on random tensors of its shapes and strides
    (``lowbit.memory.footprint``). For models on meta, absent devices and ops that are too large to run, the allocations
    come from a table; ``unmeasured`` names these ops. Gradients are enabled during the estimate.

    Args:
        model: Module with parameters that require gradients. May be on the meta device.
        batch: Tensor, tuple of arguments or dict of keyword arguments, real or on meta. Only shapes matter, and the
            values of integers and masks that forward reads.
        loss: ``loss(output, batch)``, a scalar. By default ``lb.memory.usual_loss``.
        recipe: Recipe for ``lb.train.prepare_``.
        optimizer: Name (``"adamw"``, ``"adamw8bit"``), function that creates one from parameters, or None for no step.
        checkpoint: Policy for ``lb.memory.checkpoint_``.
        precision: ``"bf16"`` or ``"fp16"``, as for ``lb.train.mixed_``.
        prepare: ``prepare(model)``, called last on the copy of the model, for other changes.
        micro_batches: Number of times that ``batch`` is accumulated before the optimizer step.
        device: Device of the training. By default the parameters' device, and ``cpu`` for parameters on meta.
        accumulate: ``accumulate(model, batch, loss)`` to run instead of forward and backward.

    Returns:
        An Estimate with ``peak_bytes``, ``peak_event``, ``by_kind``, ``by_layer``, ``by_phase``, ``timeline`` and
        ``seconds``. ``print`` shows a table.

    Raises:
        ValueError: Forward reads tensor values, as data-dependent routing does (profile a real step instead). The model
            cannot be copied, or is wrapped, sharded or streamed (see "What cannot be combined" in docs/memory.md). A
            setting is invalid.
        TypeError: ``model``, ``batch`` or a function has another type.
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
    """Raise TypeError or ValueError for an invalid argument of ``estimate``."""
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"estimate: micro_batches must be an integer from 1, got {micro_batches!r}")
    if precision not in (None, "fp32", *PRECISIONS):
        raise ValueError(f"estimate: precision must be fp32, {', '.join(PRECISIONS)} or None, got {precision!r}")
    expected = {
        "loss": (loss, "a function of output and batch"),
        "optimizer": (optimizer, "a name, or a function that creates one from parameters, such as its class"),
        "prepare": (prepare, "a function of the model"),
    }
    for name, (value, expectation) in expected.items():
        named = name == "optimizer" and isinstance(value, str)
        if value is not None and not callable(value) and not named:
            raise TypeError(f"estimate: {name} must be {expectation}, or None, got {type(value).__name__}")
