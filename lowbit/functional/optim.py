"""``adamw_``: one AdamW step on quantized moments. Source: docs/numerics.md section 11."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lowbit.functional.arguments import random_bits
from lowbit.ops.optim import STATE_SCHEME, adamw_factors, state_refusal
from lowbit.ops.optim import OptimizerStep as StepArguments
from lowbit.ops.spec import require
from lowbit.ops.steps import step_
from lowbit.rounding import Rounding
from lowbit.tensor.quantized import Quantized


def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Quantized,
    exp_avg_sq_root: Quantized,
    *,
    step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    rounding: str | Rounding = "nearest",
) -> None:
    """One AdamW step in place, on ``param`` and its quantized moments.

    Both moments have the shape of ``param``. Start with zeros:
    ``lb.quantize(torch.zeros_like(param), "fp8_e4m3:group256")``. Their schemes need blocks of at most 2,048 elements
    of one row, without zero points, signed scales or a global scale. Block boundaries of the two schemes must coincide
    at least every 2,048 elements.

    Args:
        param: Parameter, updated in place.
        grad: Its gradient.
        exp_avg: First moment.
        exp_avg_sq_root: Square root of the second moment.
        step: Number of this step, starting at 1.
        lr: Learning rate.
        betas: Decay rates of the two moments, each in ``[0, 1)``.
        eps: Added to the denominator.
        weight_decay: Decoupled weight decay.
        rounding: Rounding of the moments, as for ``encode``. Stochastic rounding also preserves updates smaller than a
            quantization step, on average. A ``Rounding`` with an integer seed takes its step from ``step``.

    Raises:
        TypeError: A dtype is unsupported, or a moment is not a Quantized.
        ValueError: Shapes, schemes or hyperparameters do not fit.

    Source: Loshchilov and Hutter, arXiv 1711.05101; Dettmers et al., arXiv 2110.02861; docs/numerics.md section 11.
    """
    for name, moment in (("exp_avg", exp_avg), ("exp_avg_sq_root", exp_avg_sq_root)):
        if not isinstance(moment, Quantized):
            raise TypeError(
                f"adamw_: {name} must be a Quantized, got {type(moment).__name__}; start with "
                f"lb.quantize(torch.zeros_like(param), {STATE_SCHEME!r})"
            )
        if moment.shape != param.shape:
            raise ValueError(f"adamw_: {name} is {list(moment.shape)}, param is {list(param.shape)}")
        refusal = state_refusal(moment.scheme)
        if refusal is not None:
            raise ValueError(f"adamw_: {name} cannot be {moment.scheme}: {refusal}; use {STATE_SCHEME}")
    if isinstance(rounding, Rounding) and isinstance(rounding.seed, int):
        if rounding.step not in (0, step):
            raise ValueError(f"adamw_: {rounding} has another step than step={step}; leave out the step of Rounding")
        rounding = replace(rounding, step=step)
    mode, *random = random_bits(rounding, param)
    param_view, grad_view = (t.detach() if t.dim() else t.detach().reshape(1) for t in (param, grad))
    _check_hyperparameters(step, lr, betas, eps, weight_decay)
    step_(
        StepArguments(
            param_view, grad_view, None, exp_avg.codes, exp_avg.scale, exp_avg_sq_root.codes, exp_avg_sq_root.scale,
            "adamw", adamw_factors(step, float(lr), *betas, eps, weight_decay),
            exp_avg.scheme.name, exp_avg_sq_root.scheme.name, mode, "nearest", *random,
        )
    )  # fmt: skip
    torch.autograd.graph.increment_version(param)


def _check_hyperparameters(step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    require(step >= 1, f"adamw_: step counts from 1, got {step}")
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        require(value >= 0, f"adamw_: {name} must be 0 or more, got {value}")
    require(all(0 <= beta < 1 for beta in betas), f"adamw_: betas must be in [0, 1), got {betas}")
