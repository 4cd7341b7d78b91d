"""Stochastic gradient descent with low-bit momentum.

Source: Sutskever et al., ICML 2013; torch.optim.SGD.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lowbit.optim.base import Optimizer, Params

__all__ = ["SGD", "SGD8bit"]


class SGD(Optimizer):
    """SGD with optional momentum and Nesterov momentum.

    State: ``momentum_buffer`` if ``momentum`` is not 0.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr, momentum, dampening, weight_decay, nesterov, maximize: As in ``torch.optim.SGD``.
        bits, master, rounding, seed: See ``Optimizer``.

    Raises:
        ValueError: ``nesterov`` without momentum or with dampening.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        bits: int | str | None = None,
        master: str | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay,
            "nesterov": nesterov, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, bits, master, rounding, seed)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        momentum, dampening = group["momentum"], group["dampening"]
        if group["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"SGD: nesterov needs momentum above 0 and dampening 0, got momentum {momentum} and dampening "
                f"{dampening}; set momentum, or nesterov=False"
            )

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        return "momentum" if group["momentum"] else "sgd"

    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        lr, momentum, l2 = float(group["lr"]), float(group["momentum"]), float(group["weight_decay"])
        if rule == "sgd":
            return 1.0, l2, lr
        mix = 1.0 if step == 1 else 1 - float(group["dampening"])
        shares = (1.0, momentum) if group["nesterov"] else (0.0, 1.0)
        return l2, momentum, mix, *shares, lr


class SGD8bit(SGD):
    """``SGD`` with ``bits=8``."""

    BITS = 8
