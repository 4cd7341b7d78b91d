"""APOLLO with low-bit states: gradients scaled by AdamW's direction in a random projection.

Source: Zhu et al., arXiv 2412.05270; the limit of the update's growth by Chen et al., arXiv 2410.01623.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lowbit.optim.base import Params
from lowbit.optim.low_rank import LowRank, Plane, gaussian
from lowbit.optim.step import Work

__all__ = ["Apollo", "Apollo8bit"]

#: Default ``scale`` by ``scaling``, as in the paper.
_SCALES = {"channel": 1.0, "tensor": math.sqrt(128)}


class Apollo(LowRank):
    """APOLLO: the gradient, with the length of each channel changed as AdamW changes it in a random projection.

    A channel is an element of the larger side of a matrix. With ``rank=1`` the whole tensor has one factor
    (APOLLO-mini). The projection is Gaussian and drawn again from the seed in every step, so it is not stored. Vectors,
    matrices whose smaller side is not larger than ``rank``, and groups with ``rank=None`` use AdamW.

    States of a matrix: ``exp_avg`` and ``exp_avg_sq_root`` of the projected gradient, and ``update_norm``, the norm of
    the last update in fp32.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr, betas, eps, weight_decay, maximize: As in ``torch.optim.AdamW``.
        rank: Dimensions of the projected space. None: the group uses AdamW. Fixed after the first step.
        refresh: Steps from one projection to the next.
        scaling: ``"channel"`` or ``"tensor"``: what has one factor. None: ``"tensor"`` with ``rank=1``, else
            ``"channel"``.
        scale: Factor of updates. None: 1 for channels, ``sqrt(128)`` for tensors.
        growth: The norm of a matrix' update is at most this factor times that of the previous step. None: no limit.
        batch_dims: With 1, a tensor is a stack of matrices ``[D1, rest]``, such as the weights of experts.
        bits, master, rounding, seed: See ``Optimizer``.
    """

    OPTIONAL = ("rank", "scale", "growth")

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int | None = 256,
        refresh: int = 200,
        scaling: str | None = None,
        scale: float | None = None,
        growth: float | None = 1.01,
        batch_dims: int = 0,
        maximize: bool = False,
        bits: int | str | None = None,
        master: str | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank, "refresh": refresh,
            "scaling": scaling, "scale": scale, "growth": growth, "batch_dims": batch_dims, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, bits, master, rounding, seed)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if group["scaling"] not in (None, *_SCALES):
            raise ValueError(f"Apollo: scaling must be None, {', '.join(map(repr, _SCALES))}, got {group['scaling']!r}")

    def replicated(self, group: dict[str, Any], param: Tensor) -> dict[str, tuple[int, ...]]:
        plane = self.plane(group, param.shape)
        return {} if plane is None else {"update_norm": plane.batch or (1,)}

    def update(self, work: Work, plane: Plane, factors: tuple[float, ...]) -> Tensor:
        group, grad = work.group, self.gradient(work, plane)
        key = group["seed"], work.layout.stream, (work.step - 1) // group["refresh"]
        projection = gaussian(plane.projection_shape, key, grad) * plane.rank**-0.5
        projected = plane.down(grad, projection)
        del projection
        scaling = group["scaling"] or ("tensor" if plane.rank == 1 else "channel")
        axes = (-2, -1) if scaling == "tensor" else (-1,) if plane.tall else (-2,)
        before = projected.norm(dim=axes, keepdim=True)
        after = self.normalized(work, projected, factors).norm(dim=axes, keepdim=True)
        scale = _SCALES[scaling] if group["scale"] is None else float(group["scale"])
        update: Tensor = grad * (after / (before + group["eps"]) * scale)
        del grad
        norm, last = update.norm(dim=(-2, -1)).view(-1), work.state["update_norm"].view(-1)
        if group["growth"] is not None:
            most = torch.where(last > 0, float(group["growth"]) * last, torch.inf)
            shrink = (most / norm).clamp(max=1.0)
            update *= shrink.view(*plane.batch, 1, 1)
            norm = norm * shrink
        last.copy_(norm)
        return update


class Apollo8bit(Apollo):
    """``Apollo`` with ``bits=8``."""

    BITS = 8
