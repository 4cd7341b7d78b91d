"""Adafactor with optional low-bit momentum.

Source: Shazeer and Stern, arXiv 1804.04235.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowbit.optim import masters
from lowbit.optim.base import Optimizer, Params
from lowbit.optim.shards import whole
from lowbit.optim.states import Storage
from lowbit.optim.step import Work, advance, direction, mean_of
from lowbit.optim.sums import Matrix

__all__ = ["Adafactor"]


class Adafactor(Optimizer):
    """Adafactor: second moments factored into rows and columns, and steps relative to the RMS of the weights.

    A tensor with more than two axes is treated as the matrix ``[D0, rest]``. States: ``row_var`` and ``col_var`` in
    fp32 for matrices, ``variance`` for vectors, and ``momentum_buffer`` with ``beta1``.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr, beta2_decay, d, weight_decay: As in ``torch.optim.Adafactor``.
        eps: Two numbers, as in the paper: added to squared gradients, and the lower bound of the weights' RMS.
        beta1: Coefficient of a moving average of updates, stored as ``bits`` says. None stores no average.
        maximize: Maximize the objective instead of minimizing it.
        bits, master, rounding, seed: See ``Optimizer``.
    """

    PAIRS = ("eps",)
    OPTIONAL = ("eps", "beta1")
    ONE_BY_ONE = frozenset({"sgd", "momentum"})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float, float] = (1e-30, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        *,
        beta1: float | None = None,
        maximize: bool = False,
        bits: int | str | None = None,
        master: str | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay, "beta1": beta1,
            "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, bits, master, rounding, seed)

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        return "sgd" if group["beta1"] is None else "momentum"

    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        return () if rule == "sgd" else mean_of(float(group["beta1"]))

    def storages(self, group: dict[str, Any], param: Tensor) -> dict[str, Storage]:
        variance = {} if param.dim() > 1 else {"variance": Storage("fp32", tuple(param.shape) or (1,))}
        return {**variance, **super().storages(group, param)}

    def replicated(self, group: dict[str, Any], param: Tensor) -> dict[str, tuple[int, ...]]:
        if param.dim() < 2:
            return {}
        return {"row_var": (param.shape[0], 1), "col_var": (1, torch.Size(param.shape[1:]).numel())}

    def from_torch(self, param: Tensor, states: dict[str, Any]) -> dict[str, Any]:
        """Factor the second moment along ``[D0, rest]`` if torch factored the last two axes of a larger tensor."""
        rows, cols = (states.get(name) for name in ("row_var", "col_var"))
        shapes = [tuple(x.shape) if isinstance(x, Tensor) else None for x in (rows, cols)]
        expected = [(*param.shape[:-1], 1), (*param.shape[:-2], 1, *param.shape[-1:])]
        if param.dim() < 3 or shapes != expected or rows is None or cols is None:
            return states
        row, col = whole(rows).float(), whole(cols).float()
        means = row.mean(-2, keepdim=True)
        square = (row * col / means.clamp(min=torch.finfo(torch.float32).tiny)).flatten(1)
        return {**states, "row_var": square.mean(1, keepdim=True), "col_var": square.mean(0, keepdim=True)}

    def to_torch(self, param: Tensor, states: dict[str, Tensor]) -> dict[str, Tensor]:
        if param.dim() < 3:
            return states
        row, col = states["row_var"], states["col_var"]
        square = (row * col / row.mean().clamp(min=torch.finfo(torch.float32).tiny)).view(param.shape)
        return {**states, "row_var": square.mean(-1, keepdim=True), "col_var": square.mean(-2, keepdim=True)}

    def apply(self, work: Work, factors: tuple[float, ...]) -> None:
        group, step, state = work.group, float(work.step), work.state
        matrix, new = Matrix(work.part), step ** group["beta2_decay"]
        grad = matrix.of(work.grad).float()
        tiny = max(group["eps"][0] or 0.0, 1e-30)  # torch's state may have None; 0 would be divided by 0
        update = _of_matrix(matrix, grad, state, tiny, new) if work.part.is_matrix else _of_vector(work, tiny, new)
        count = torch.Size(work.part.shape).numel()
        size = float(matrix.squares(update, (0,))[0].sum() / count) ** 0.5
        update /= max(1.0, size / group["d"])
        weights = work.param if work.master is None else masters.number(work.param, work.master)
        weight = float(matrix.squares(matrix.of(weights), (0,))[0].sum() / count) ** 0.5
        lr = float(group["lr"])
        rate = max(group["eps"][1], weight) * min(lr, step**-0.5)
        moments = {name: storage for name, storage in work.layout.moments.items() if name != "variance"}
        if factors:
            update = direction(work, update, moments, factors)
        grad = update.view(work.param.shape)
        advance(work.other("sgd", {}, grad=grad), (1 - lr * float(group["weight_decay"]), 0.0, rate))


def _of_matrix(matrix: Matrix, grad: Tensor, state: dict[str, Any], eps: float, new: float) -> Tensor:
    """The gradient divided by the root of its second moment, the product of a row factor and a column factor."""
    rows, cols = matrix.squares(grad)
    for name, total, size in (("row_var", rows, matrix.cols), ("col_var", cols, matrix.rows)):
        state[name].view(-1).lerp_((total / size + eps).float(), new)
    row, col = (state[name].view(-1).double() for name in ("row_var", "col_var"))
    by_row, by_col = (row / row.mean()).rsqrt().float(), col.rsqrt().float()
    return torch.mul(grad, matrix.here(by_row, 0)[:, None]).mul_(matrix.here(by_col, 1))


def _of_vector(work: Work, eps: float, new: float) -> Tensor:
    grad = work.grad.float()
    variance = work.local("variance")
    variance.lerp_(grad.square().add_(eps), new)
    return (grad * variance.rsqrt()).view(-1, 1)
