"""Muon with low-bit momentum, and AdamW for vectors, embeddings and heads.

Source: Jordan et al., 2024; Liu et al., arXiv 2502.16982; with quantized momentum arXiv 2509.23106.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lowbit.ops.optim import adamw_factors
from lowbit.optim.base import Optimizer, Params
from lowbit.optim.shards import whole
from lowbit.optim.step import Work, advance, direction, mean_of

__all__ = ["Muon", "Muon8bit"]

#: Factor of the learning rate for a matrix ``[rows, cols]``, by ``adjust_lr_fn``.
_ADJUST: dict[str | None, Callable[[int, int], float]] = {
    None: lambda rows, cols: max(1.0, rows / cols) ** 0.5,
    "original": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
    "match_rms_adamw": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
}


class Muon(Optimizer):
    """Muon: momentum orthogonalized by Newton-Schulz iterations.

    A tensor with more than two axes is treated as the matrix ``[D0, rest]``. Vectors, and groups with ``muon=False``
    (embeddings and heads), use AdamW. States: ``momentum_buffer``, or the states of ``AdamW``.

    The iterations run in bf16 on GPUs and in fp32 elsewhere. For a DTensor, each process gathers the full matrix.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps: As in ``torch.optim.Muon``.
        eps: Lower bound of the norm that a matrix is divided by, as in ``torch.optim.Muon``. Also AdamW's ``eps``.
        adjust_lr_fn: As in ``torch.optim.Muon``. With ``"match_rms_adamw"``, Muon and AdamW use the same ``lr``.
        betas: AdamW's ``betas``, for parameters that use AdamW.
        muon: False makes a group use AdamW.
        batch_dims: With 1, a tensor is a stack of matrices ``[D1, rest]``, such as the weights of experts.
        maximize: Maximize the objective instead of minimizing it.
        bits, master, rounding, seed: See ``Optimizer``.
    """

    ONE_BY_ONE = frozenset({"momentum"})

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        muon: bool = True,
        batch_dims: int = 0,
        maximize: bool = False,
        bits: int | str | None = None,
        master: str | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn, "betas": betas, "muon": muon,
            "batch_dims": batch_dims, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, bits, master, rounding, seed)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if group["adjust_lr_fn"] not in _ADJUST:
            raise ValueError(
                f"Muon: adjust_lr_fn must be one of {', '.join(map(repr, _ADJUST))}, got {group['adjust_lr_fn']!r}"
            )
        abc = group["ns_coefficients"]
        if not isinstance(abc, tuple | list) or len(abc) != 3 or not all(math.isfinite(x) for x in abc):
            raise ValueError(f"Muon: ns_coefficients must be three finite numbers, got {abc!r}")

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        return "momentum" if group["muon"] and param.dim() > 1 + group["batch_dims"] else "adamw"

    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        lr, momentum = float(group["lr"]), float(group["momentum"])
        if rule == "adamw":
            beta1, beta2 = group["betas"]
            return adamw_factors(step, lr, float(beta1), float(beta2), group["eps"], float(group["weight_decay"]))
        return mean_of(momentum, group["nesterov"])

    def apply(self, work: Work, factors: tuple[float, ...]) -> None:
        if work.layout.rule != "momentum":
            super().apply(work, factors)
            return
        group, part = work.group, work.part
        update = direction(work, work.grad, work.layout.moments, factors)
        batch = group["batch_dims"]
        matrix = whole(part.tensor(update, part.shape)).reshape(*part.shape[: batch + 1], -1)
        orthogonalized = orthogonal(matrix, group["ns_steps"], group["ns_coefficients"], group["eps"])
        lr = float(group["lr"])
        rate = lr * _ADJUST[group["adjust_lr_fn"]](*matrix.shape[-2:])
        grad = part.shard_of(orthogonalized.reshape(part.shape)).contiguous()
        advance(work.other("sgd", {}, grad=grad), (1 - lr * float(group["weight_decay"]), 0.0, rate))


class Muon8bit(Muon):
    """``Muon`` with ``bits=8``."""

    BITS = 8


def orthogonal(matrix: Tensor, steps: int, coefficients: tuple[float, float, float], eps: float) -> Tensor:
    """Matrices with the shape ``[..., m, n]``, dtype and singular vectors of ``matrix``, and singular values near 1."""
    a, b, c = coefficients
    x: Tensor = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x.mT if tall else x).to(matrix.dtype)
