"""Base of the optimizers whose states of a matrix are those of AdamW for a projection of its gradient.

A subclass chooses the projection, and turns AdamW's direction in the projected space into an update.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lowbit.ops.optim import RULES, adamw_factors
from lowbit.optim.base import Optimizer
from lowbit.optim.shards import whole
from lowbit.optim.states import Storage, find
from lowbit.optim.step import Work, advance, direction
from lowbit.torch_private import is_fake

__all__ = ["LowRank", "Plane", "gaussian"]

#: The rule of matrices whose gradient is projected.
_PROJECTED = "projected"


class Plane(NamedTuple):
    """A parameter as matrices ``[*batch, rows, cols]``, whose smaller side is projected to ``rank`` dimensions."""

    batch: tuple[int, ...]
    rows: int
    cols: int
    rank: int

    @property
    def tall(self) -> bool:
        """Whether the columns are projected; else the rows."""
        return self.rows > self.cols

    @property
    def small(self) -> int:
        return min(self.rows, self.cols)

    @property
    def projection_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.small, self.rank)

    @property
    def projected_shape(self) -> tuple[int, ...]:
        return (*self.batch, self.rows, self.rank) if self.tall else (*self.batch, self.rank, self.cols)

    def down(self, grad: Tensor, projection: Tensor) -> Tensor:
        """The projected gradient, contiguous."""
        return grad @ projection if self.tall else projection.mT @ grad

    def up(self, projected: Tensor, projection: Tensor) -> Tensor:
        """A matrix ``[*batch, rows, cols]`` from the projected space."""
        return projected @ projection.mT if self.tall else projection @ projected


class LowRank(Optimizer):
    """Base class: matrices larger than ``rank`` step by a projection, all other parameters by AdamW.

    A tensor with more than two axes is treated as the matrix ``[D0, rest]``, or with ``batch_dims=1`` as a stack of
    matrices ``[D1, rest]``. For a DTensor, each process gathers the full gradient of one parameter at a time. States
    of a sharded matrix are sharded by their own rows.
    """

    ONE_BY_ONE = frozenset({_PROJECTED})
    OPTIONAL: tuple[str, ...] = ("rank",)
    FIXED: tuple[str, ...] = ("rank", "batch_dims")
    #: Hyperparameters that are whole numbers, with their lower bounds.
    WHOLE: ClassVar[dict[str, int]] = {"rank": 1, "refresh": 1, "batch_dims": 0}

    def check(self, group: dict[str, Any]) -> None:
        super().check(group)
        for name, least in self.WHOLE.items():
            value = group[name]
            if not (value is None and name in self.OPTIONAL) and (type(value) is not int or value < least):
                none = ", or None" if name in self.OPTIONAL else ""
                raise ValueError(
                    f"{type(self).__name__}: {name} must be an integer of at least {least}{none}, got {value!r}"
                )

    def plane(self, group: dict[str, Any], shape: Sequence[int]) -> Plane | None:
        """The matrices that a parameter of ``shape`` is projected as; None if it steps by AdamW."""
        axes = group["batch_dims"]
        if group["rank"] is None or len(shape) < 2 + axes:
            return None
        rest = torch.Size(shape[axes + 1 :]).numel()
        plane = Plane(tuple(shape[:axes]), shape[axes], rest, group["rank"])
        return plane if plane.rank < plane.small else None

    def rule(self, group: dict[str, Any], param: Tensor) -> str:
        return "adamw" if self.plane(group, param.shape) is None else _PROJECTED

    def storages(self, group: dict[str, Any], param: Tensor) -> dict[str, Storage]:
        plane = self.plane(group, param.shape)
        if plane is None:
            return super().storages(group, param)
        row = find(group["bits"])
        return {m: Storage.of(row, plane.projected_shape, not m.endswith("_root")) for m in RULES["adamw"].moments}

    def factors(self, group: dict[str, Any], rule: str, step: int) -> tuple[float, ...]:
        beta1, beta2 = map(float, group["betas"])
        # A step of a parameter of zeros with the learning rate -1 is AdamW's direction.
        lr, decay = (-1.0, 0.0) if rule == _PROJECTED else (float(group["lr"]), float(group["weight_decay"]))
        return adamw_factors(step, lr, beta1, beta2, group["eps"], decay)

    def apply(self, work: Work, factors: tuple[float, ...]) -> None:
        plane = self.plane(work.group, work.part.shape)
        if plane is None:
            super().apply(work, factors)
            return
        part, lr = work.part, float(work.group["lr"])
        update = self.update(work, plane, factors).reshape(part.shape)
        grad = part.shard_of(update).contiguous()
        advance(work.other("sgd", {}, grad=grad), (1 - lr * float(work.group["weight_decay"]), 0.0, lr))

    def update(self, work: Work, plane: Plane, factors: tuple[float, ...]) -> Tensor:
        """The full update ``[*batch, rows, cols]`` in fp32, without the learning rate."""
        raise NotImplementedError

    def gradient(self, work: Work, plane: Plane) -> Tensor:
        """The full gradient ``[*batch, rows, cols]`` in fp32. If it is sharded, all processes must call this."""
        grad = whole(work.part.tensor(work.grad, work.part.shape))
        return grad.float().contiguous().view(*plane.batch, plane.rows, plane.cols)

    def normalized(self, work: Work, projected: Tensor, factors: tuple[float, ...]) -> Tensor:
        """AdamW's full direction in the projected space, from the full projected gradient."""
        moments = {name: work.layout.moments[name] for name in RULES["adamw"].moments}
        part = work.part.of_state(projected.shape)
        shard = part.shard_of(projected).contiguous()
        return whole(part.tensor(direction(work, shard, moments, factors, "adamw"), projected.shape))


def gaussian(shape: Sequence[int], key: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal numbers in fp32, on the device of ``like``.

    They depend only on ``key``, the shape and the type of the device.
    """
    if is_fake(like):
        return torch.randn(shape, device=like.device)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator(like.device).manual_seed(int.from_bytes(digest, "little"))
    return torch.randn(shape, generator=generator, device=like.device)
