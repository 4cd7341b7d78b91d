"""AdamW with low-bit states.

Source: Loshchilov and Hutter, arXiv 1711.05101; Dettmers et al., arXiv 2110.02861.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.ops.optim import adamw_factors
from lowbit.optim.base import Optimizer, Params

__all__ = ["AdamW", "AdamW4bit", "AdamW8bit"]


class AdamW(Optimizer):
    """AdamW with decoupled weight decay; it stores the square root of the second moment.

    States: ``exp_avg`` and ``exp_avg_sq_root``. Each has a scale tensor (``..._scale``) if it is quantized.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr, betas, eps, weight_decay, maximize: As in ``torch.optim.AdamW``.
        bits: Bit width of the states: 32, 16, 8 (default), 4, or a name from ``STATES``.
        master: How 16-bit parameters keep the bits that rounding cuts off: ``"fp32"``, ``"residual"`` or
            ``"stochastic"``. None: they are lost, as in torch.
        rounding: Rounding of the states, ``"stochastic"`` or ``"nearest"``. None: the default of ``bits``.
        seed: Seed of all random bits.

    ``lowbit.optim.Optimizer`` describes the last four in full.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        bits: int | str | None = None,
        master: str | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults, bits, master, rounding, seed)

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        return "adamw"

    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        beta1, beta2 = group["betas"]
        return adamw_factors(step, float(group["lr"]), float(beta1), float(beta2), group["eps"], group["weight_decay"])


class AdamW8bit(AdamW):
    """``AdamW`` with ``bits=8``."""

    BITS = 8


class AdamW4bit(AdamW):
    """``AdamW`` with ``bits=4``."""

    BITS = 4
