"""Recipes that need the state of training, and a small model for them."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lowbit as lb


def cast(format: str, **more) -> lb.Cast:
    return lb.Cast(f"{format}:tensor", **more)


STOCHASTIC = lb.Recipe(
    lb.RECIPES["fp8-tensor"].output,
    lb.Gemm(cast("fp8_e5m2", rounding="stochastic"), "reuse"),
    lb.Gemm(cast("fp8_e5m2", rounding="stochastic"), cast("fp8_e4m3", rounding="stochastic"), save="high"),
    name="stochastic",
)
#: With folded scales, and operands of forward rounded so too.
STOCHASTIC_ROWS = lb.Recipe(
    lb.Gemm(*[lb.Cast("fp8_e4m3:row", rounding="stochastic")] * 2),
    lb.Gemm(lb.Cast("fp8_e5m2:row", rounding="stochastic"), "fold"),
    lb.Gemm(lb.Cast("fp8_e5m2:col", rounding="stochastic"), "fold"),
    name="stochastic-rows",
)
DELAYED = lb.Recipe(
    lb.Gemm(*[cast("fp8_e4m3", scale="delayed", history=3)] * 2),
    lb.Gemm(cast("fp8_e5m2", scale="delayed", history=3), "reuse"),
    lb.Gemm(cast("fp8_e5m2", scale="delayed", history=3), "reuse", save="recompute"),
    name="delayed",
)


class Model(nn.Module):
    def __init__(self, recipe: lb.Recipe | str | dict) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(33, 48), nn.Linear(48, 33, bias=False)
        lb.train.prepare_(self, recipe)

    def inner(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.silu(self.up(x)))

    def forward(self, x: Tensor, recompute: bool = False) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if recompute else self.inner(x)
