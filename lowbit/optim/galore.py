"""GaLore with low-bit states, and a low-bit projection that is refreshed lazily (Q-GaLore).

Source: Zhao et al., arXiv 2403.03507; Zhang et al., arXiv 2407.08296; the projection by Halko et al., arXiv 0909.4061.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbit.optim.base import Params
from lowbit.optim.low_rank import LowRank, Plane, gaussian
from lowbit.optim.shards import local
from lowbit.optim.states import States, Storage, Stored, encoded
from lowbit.optim.step import Work

__all__ = ["GaLore", "GaLore8bit"]

#: Formats of the projection by bit width. Projections of fewer than 4096 elements are in fp32.
_PROJECTIONS = {
    32: States("fp32", 32, "fp32", "fp32", "nearest"),
    8: States("int8", 8, "int8:group256", "int8:group256", "nearest"),
    4: States("int4", 4, "int4:group128", "int4:group128", "nearest"),
}
#: The subspace iteration has this many more columns than the rank, and multiplies by the squared matrix so many times.
_EXTRA, _POWERS = 8, 2


class GaLore(LowRank):
    """GaLore: AdamW in the space of the gradient's leading singular vectors.

    Every matrix has a projection to ``rank`` dimensions of its smaller side. A refresh computes it from the gradient by
    randomized subspace iteration. Vectors, matrices whose smaller side is not larger than ``rank``, and groups with
    ``rank=None`` (embeddings and heads) use AdamW.

    A parameter whose gradient was 0 at a refresh refreshes again in the next step. The signs of singular vectors are
    chosen so that each one continues its predecessor.

    States of a matrix: ``exp_avg`` and ``exp_avg_sq_root`` of the projected gradient, ``projection``, and the numbers
    ``refresh_at``, ``interval`` and ``streak`` in host memory.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr, betas, eps, weight_decay, maximize: As in ``torch.optim.AdamW``.
        rank: Dimensions of the projected space. None: the group uses AdamW. Fixed after the first step.
        refresh: Steps from one refresh of the projection to the next.
        scale: Factor of projected updates.
        projection_bits: Bits of the projection: 4 (int4), 8 (int8) or 32 (fp32). Fixed after the first step.
        similarity: The interval of a parameter doubles after ``patience`` successive refreshes whose singular vectors
            have at least this mean cosine similarity with the previous ones. None: it stays ``refresh``.
        patience: See ``similarity``.
        batch_dims: With 1, a tensor is a stack of matrices ``[D1, rest]``, such as the weights of experts.
        bits, master, rounding, seed: See ``Optimizer``.
    """

    OPTIONAL = ("rank", "similarity")
    FIXED = ("rank", "projection_bits", "batch_dims")
    WHOLE: ClassVar[dict[str, int]] = {**LowRank.WHOLE, "patience": 1}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        rank: int | None = 128,
        refresh: int = 200,
        scale: float = 0.25,
        projection_bits: int = 4,
        similarity: float | None = 0.4,
        patience: int = 5,
        batch_dims: int = 0,
        maximize: bool = False,
        bits: int | str | None = None,
        master: str | None = None,
        rounding: str | None = None,
        seed: int = 0,
    ) -> None:
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "rank": rank, "refresh": refresh,
            "scale": scale, "projection_bits": projection_bits, "similarity": similarity, "patience": patience,
            "batch_dims": batch_dims, "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults, bits, master, rounding, seed)

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        if group["projection_bits"] not in _PROJECTIONS:
            raise ValueError(
                f"GaLore: projection_bits must be {', '.join(map(str, _PROJECTIONS))}, got {group['projection_bits']!r}"
            )

    def storages(self, group: dict[str, Any], param: Tensor) -> dict[str, Storage]:
        plane = self.plane(group, param.shape)
        if plane is None:
            return super().storages(group, param)
        projection = Storage.of(_PROJECTIONS[group["projection_bits"]], plane.projection_shape, True)
        return {**super().storages(group, param), "projection": projection}

    def counters(self, group: dict[str, Any], param: Tensor) -> dict[str, float]:
        if self.plane(group, param.shape) is None:
            return {}
        return {"refresh_at": 1.0, "interval": float(group["refresh"]), "streak": 0.0}

    def update(self, work: Work, plane: Plane, factors: tuple[float, ...]) -> Tensor:
        grad = self.gradient(work, plane)
        if work.step >= float(work.state["refresh_at"]):
            _refresh(work, plane, grad)
        projection = _projection(work)
        projected = plane.down(grad, projection)
        del grad
        return plane.up(self.normalized(work, projected, factors) * float(work.group["scale"]), projection)


class GaLore8bit(GaLore):
    """``GaLore`` with ``bits=8``."""

    BITS = 8


def _projection(work: Work) -> Tensor:
    """The full projection in fp32, as it is stored."""
    scale = work.state.get("projection_scale")
    return Stored(work.layout.moments["projection"], work.state["projection"], scale).numbers()


def _refresh(work: Work, plane: Plane, grad: Tensor) -> None:
    """Store the projection of this gradient, and choose the step of the next refresh."""
    group, state, storage = work.group, work.state, work.layout.moments["projection"]
    key = group["seed"], work.layout.stream, work.step
    new, size = leading(grad.mT if plane.tall else grad, plane.rank, key)
    if work.step > 1:
        before = _projection(work)
        new = torch.where((new * before).sum(-2, keepdim=True) < 0, -new, new)
        similarity = float(F.cosine_similarity(before, new, dim=-2).mean())
        alike = group["similarity"] is not None and similarity >= float(group["similarity"])
        streak = float(state["streak"]) + 1 if alike else 0.0
        if streak >= group["patience"]:
            state["interval"].mul_(2)
            streak = 0.0
        state["streak"].fill_(streak)
    part = work.part.of_state(plane.projection_shape)
    stored = encoded(part, storage, work.layout.name, new)
    for name, value in (("projection", stored.codes), ("projection_scale", stored.scale)):
        if value is not None:
            local(state[name]).copy_(local(value))
    state["refresh_at"].fill_(work.step + (1.0 if float(size) == 0 else float(state["interval"])))


def leading(x: Tensor, rank: int, key: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The leading left singular vectors of matrices, by randomized subspace iteration.

    Args:
        x: fp32 ``[*batch, m, n]``, ``m`` at most ``n``.
        rank: Number of vectors.
        key: Key of the random start.

    Returns:
        Orthonormal columns ``[*batch, m, rank]``, the leading one first, and the largest singular value.
    """
    width = min(rank + _EXTRA, x.shape[-2])
    sketch = x @ gaussian((*x.shape[:-2], x.shape[-1], width), key, x)
    for _ in range(_POWERS):
        sketch = x @ (x.mT @ torch.linalg.qr(sketch).Q)
    basis = torch.linalg.qr(sketch).Q
    core = torch.linalg.qr(x.mT @ basis, mode="r").R.mT  # with the left singular vectors of basis.mT @ x
    # A gradient with Inf or NaN makes the basis NaN; svd would raise an error for its core.
    core = torch.where(core.isfinite().all(), core, torch.eye(width, device=x.device))
    vectors, values, _ = torch.linalg.svd(core)
    return basis @ vectors[..., :rank], values.max()
