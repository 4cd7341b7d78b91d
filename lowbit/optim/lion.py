"""Lion with a low-bit state.

Source: Chen et al., arXiv 2302.06675.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.optim.base import Optimizer, Params

__all__ = ["Lion", "Lion4bit", "Lion8bit"]


class Lion(Optimizer):
    """Lion: updates by the sign of a moving average of gradients, with decoupled weight decay.

    State: ``exp_avg``.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate, about a tenth of AdamW's.
        betas: Coefficients of the update and of the stored average, as in the paper.
        weight_decay: Decoupled weight decay, about ten times AdamW's.
        maximize: Maximize the objective instead of minimizing it.
        bits, master, rounding, seed: See ``Optimizer``.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        bits: int | str | None = None,
        master: str | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, bits, master, rounding, seed)

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        return "lion"

    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        return 1 - lr * group["weight_decay"], 1 - float(beta1), 1 - float(beta2), lr


class Lion8bit(Lion):
    """``Lion`` with ``bits=8``."""

    BITS = 8


class Lion4bit(Lion):
    """``Lion`` with ``bits=4``."""

    BITS = 4
