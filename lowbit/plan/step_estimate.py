"""``lb.estimate``: memory and time of a training step, or the memory that does not depend on a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, overload

import torch
from torch import Tensor, nn

from lowbit.checkpointing.apply import checkpoint_
from lowbit.memory.devices import Device, placed
from lowbit.memory.estimator import Accumulate, Estimate, MakeOptimizer, estimate_step
from lowbit.optim.names import find_optimizer, with_masters
from lowbit.plan.static_estimate import StaticEstimate, model_of_size, static_estimate
from lowbit.recipes import Recipe
from lowbit.train import mixed_, prepare_
from lowbit.train.mixed import PRECISIONS

__all__ = ["estimate"]


@overload
def estimate(
    model: nn.Module | None = None,
    *,
    parameters: float | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    optimizer: str | MakeOptimizer | None = "adamw",
    precision: str | None = None,
    master: str | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
    device: torch.device | str | Device | None = None,
) -> StaticEstimate: ...
@overload
def estimate(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    optimizer: str | MakeOptimizer | None = "adamw",
    checkpoint: Any = None,
    *,
    precision: str | None = None,
    master: str | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
    micro_batches: int = 1,
    device: torch.device | str | Device | None = None,
    accumulate: Accumulate | None = None,
) -> Estimate: ...
def estimate(
    model: nn.Module | None = None,
    batch: Any = None,
    loss: Callable[[Any, Any], Tensor] | None = None,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    optimizer: str | MakeOptimizer | None = "adamw",
    checkpoint: Any = None,
    *,
    parameters: float | None = None,
    precision: str | None = None,
    master: str | None = None,
    prepare: Callable[[nn.Module], object] | None = None,
    micro_batches: int = 1,
    device: torch.device | str | Device | None = None,
    accumulate: Accumulate | None = None,
) -> Estimate | StaticEstimate:
    """Estimate the memory and the time of a step that trains ``model`` on ``batch``.

    Without a batch, return the memory that does not depend on it: parameters, gradients, optimizer states, masters and
    buffers. No forward runs, so this is fast for large models on meta. ``parameters=7e9`` gives the same for a number
    of parameters instead of a model, as if they were one matrix. Activations are not included.

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
        parameters: Number of parameters, instead of a model and a batch.
        batch: Tensor, tuple of arguments or dict of keyword arguments, real or on meta. Only shapes matter, and the
            values of integers and masks that forward reads.
        loss: ``loss(output, batch)``, a scalar. By default ``lb.memory.usual_loss``.
        recipe: Recipe for ``lb.train.prepare_``.
        optimizer: Name (``"adamw"``, ``"adamw8bit"``), function that creates one from parameters, or None for no step.
        checkpoint: Policy for ``lb.memory.checkpoint_``.
        precision: ``"bf16"`` or ``"fp16"``, as for ``lb.train.mixed_``. The parameters stay in fp32, unless ``master``
            is given.
        master: ``"fp32"``, ``"residual"`` or ``"stochastic"``: the masters of ``lb.optim`` for parameters in 16 bits.
            With ``precision``, matrices become working copies in 16 bits. Needs an optimizer by name.
        prepare: ``prepare(model)``, called last on the copy of the model, for other changes.
        micro_batches: Number of times that ``batch`` is accumulated before the optimizer step.
        device: Device of the training. By default the parameters' device, and ``cpu`` for parameters on meta. A name of
            ``lb.plan.DEVICES``, such as ``"rtx-4090"``: sizes are then those of CUDA, and ``seconds`` is a roofline.
        accumulate: ``accumulate(model, batch, loss)`` to run instead of forward and backward.

    Returns:
        An Estimate with ``peak_bytes``, ``peak_event``, ``by_kind``, ``by_layer``, ``by_op``, ``by_phase``,
        ``timeline`` and ``seconds``. Without a batch, a StaticEstimate with ``total_bytes`` and ``by_kind``. Both have
        ``fits("24GiB")``, and ``print`` shows a table.

    Raises:
        ValueError: Forward reads tensor values, as data-dependent routing does (profile a real step instead). The model
            cannot be copied, or is wrapped, sharded or streamed (see "What cannot be combined" in docs/memory.md). A
            setting is invalid, or is for a step and there is no batch.
        TypeError: ``model``, ``batch`` or a function has another type.
    """
    _check(loss, optimizer, precision, prepare, micro_batches)
    if batch is None or parameters is not None:
        of_step = {"loss": loss, "checkpoint": checkpoint, "accumulate": accumulate}
        _check_static(
            model, parameters, batch, {**of_step, "micro_batches": micro_batches if micro_batches > 1 else None}
        )
    make = _maker(optimizer, master)

    def prepared(copied: nn.Module) -> None:
        if recipe is not None:
            prepare_(copied, recipe)
        if precision in PRECISIONS:
            mixed_(copied, precision, working_copies=master is not None)
        elif master is not None:
            _require_short(copied, master)
        if checkpoint is not None:
            checkpoint_(copied, checkpoint)
        if prepare is not None:
            prepare(copied)

    on, _ = placed(device)  # sizes without a step are the same on all devices
    if parameters is not None:
        return static_estimate(model_of_size(parameters), make, prepared, on, counters=False)
    assert model is not None
    if batch is None:
        return static_estimate(model, make, prepared, on)
    return estimate_step(
        model,
        batch,
        loss,
        optimizer=make,
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


def _check_static(model: Any, parameters: Any, batch: Any, of_step: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments that do not go together without a model or a batch."""
    if (model is None) == (parameters is None):
        raise ValueError(
            "estimate: expected a model or parameters=, a number such as 7e9, got "
            + ("neither" if model is None else "both; leave one out")
        )
    if batch is not None:
        raise ValueError("estimate: parameters= has no forward to run on a batch; pass a model, or leave the batch out")
    given = [name for name, value in of_step.items() if value is not None]
    if given:
        remedy = "pass a batch" if parameters is None else "pass a model and a batch"
        raise ValueError(f"estimate: {', '.join(given)} changes only a step, and there is no batch; {remedy}")


def _maker(optimizer: str | MakeOptimizer | None, master: str | None) -> MakeOptimizer | None:
    if master is not None and not isinstance(optimizer, str):
        raise ValueError(
            f"estimate: master={master!r} needs an optimizer by name, got {optimizer!r}; pass master to the optimizer "
            f"in your function, and working copies by prepare=lambda model: lb.train.mixed_(model, working_copies=True)"
        )
    if not isinstance(optimizer, str):
        return optimizer
    return find_optimizer(optimizer).make if master is None else with_masters(optimizer, master)


def _require_short(model: nn.Module, master: str) -> None:
    if not any(p.requires_grad and p.dtype in PRECISIONS.values() for p in model.parameters()):
        raise ValueError(
            f"estimate: master={master!r} is for trained parameters in 16 bits, and there are none; pass "
            f"precision='bf16'"
        )
