"""The part of a parameter that this process holds: its place in the whole tensor, and states that lie as it does.

A parameter is a tensor, or a DTensor that is replicated or cut along its axes. Blocks, random bits and the choice of a
format are counted along the whole tensor seen flat; so a part says where in it its rows lie.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Part", "gradient", "is_dtensor", "local", "whole"]


def is_dtensor(x: Any) -> bool:
    """Whether a tensor is spread over processes."""
    module = sys.modules.get("torch.distributed.tensor")  # who has a DTensor has imported it
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    part: Tensor = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return part.detach()


def whole(x: Tensor) -> Tensor:
    """All of a tensor; every process takes part where it is cut."""
    full: Tensor = x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return full.detach()


def gradient(param: Tensor) -> Tensor:
    """What this process holds of a parameter's gradient, laid out as the parameter is."""
    grad = param.grad
    assert grad is not None
    if is_dtensor(param) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return local(grad)


@dataclass(frozen=True)
class Part:
    """``rows`` of ``cols`` elements: row i begins at element ``offset + i * pitch`` of the whole tensor seen flat.

    ``cuts``: how each axis is cut that is. ``groups``: the process groups across which the tensor is.
    """

    shape: tuple[int, ...]
    rows: int
    cols: int
    offset: int
    pitch: int
    cuts: dict[int, Cut] = field(default_factory=dict)
    groups: tuple[Any, ...] = ()
    mesh: Any = None
    placements: tuple[Any, ...] = ()

    @classmethod
    def of(cls, x: Tensor, name: str) -> Part:
        """Raises ValueError, for the parameter ``name``, where a DTensor's parts are not rows at even distances."""
        shape = tuple(x.shape) or (1,)
        if not is_dtensor(x):
            return cls(shape, 1, prod(shape), 0, max(prod(shape), 1))
        mesh, placements = x.device_mesh, tuple(x.placements)  # type: ignore[attr-defined]
        _require_known(placements, name)
        cuts = _cuts(shape, mesh, placements)
        axes = sorted(cuts)
        if any(prod(shape[:axis]) > 1 for axis in axes[:-1]):
            raise ValueError(
                f"{name} {list(shape)} is sharded along its axes {axes}; an optimizer of lowbit takes tensors that "
                "are sharded along one axis, or along the first and another"
            )
        last = axes[-1] if axes else 0
        held = [cuts[axis].length if axis in cuts else size for axis, size in enumerate(shape)]
        offset = sum(cuts[axis].start * prod(shape[axis + 1 :]) for axis in axes)
        groups = tuple(
            mesh.get_group(level) for level, p in enumerate(placements) if p.is_shard() and mesh.size(level) > 1
        )
        pitch = max(prod(shape[last:]), 1)
        return cls(shape, prod(held[:last]), prod(held[last:]), offset, pitch, cuts, groups, mesh, placements)

    @property
    def is_matrix(self) -> bool:
        """Whether the whole tensor has more than one axis."""
        return len(self.shape) > 1

    @property
    def numel(self) -> int:
        """Elements that this process holds."""
        return self.rows * self.cols

    def holds_blocks(self, block: int) -> bool:
        """Whether every block of so many elements, counted along the whole tensor, lies in one process' part."""
        last = max(self.cuts, default=0)
        return all(
            cut.chunk * prod(self.shape[axis + 1 :]) % block == 0 and cut.chunk > 0 for axis, cut in self.cuts.items()
        ) and (prod(self.shape[:last]) == 1 or self.pitch % block == 0)

    def cuts_alike(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of ``shape``, whose elements stand for several in a row each, is cut at the same places."""
        if not self.cuts:
            return True
        if max(self.cuts) >= len(shape):
            return False
        per, there = prod(self.shape) // max(prod(shape), 1), _cuts(tuple(shape), self.mesh, self.placements)
        return all(
            there[axis].chunk * prod(shape[axis + 1 :]) * per == cut.chunk * prod(self.shape[axis + 1 :])
            and cut.chunk > 0
            for axis, cut in self.cuts.items()
        )

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """What this process holds of a tensor of the whole ``shape`` that is placed as the parameter is."""
        cuts = self._cuts_of(shape)
        return tuple(cuts[axis].length if axis in cuts else size for axis, size in enumerate(shape))

    def of_whole(self, x: Tensor) -> Tensor:
        """This process' part of a whole tensor."""
        for axis, cut in self._cuts_of(x.shape).items():
            x = x.narrow(axis, cut.start, cut.length)
        return x

    def _cuts_of(self, shape: Sequence[int]) -> dict[int, Cut]:
        return _cuts(tuple(shape), self.mesh, self.placements) if self.cuts else {}

    def tensor(self, mine: Tensor, shape: Sequence[int]) -> Tensor:
        """A tensor of the whole ``shape``, placed as the parameter is, of which this process holds ``mine``."""
        if self.mesh is None:
            return mine
        from torch.distributed.tensor import DTensor

        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return DTensor.from_local(
            mine, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=strides
        )

    def places(self, device: torch.device) -> Tensor:
        """int64 [rows, cols]: the place of every element in the whole tensor seen flat."""
        rows, cols = (torch.arange(count, device=device) for count in (self.rows, self.cols))
        return self.offset + rows[:, None] * self.pitch + cols


@dataclass(frozen=True)
class Cut:
    """An axis that is cut: this process holds ``length`` of it from ``start`` on.

    ``chunk``: what all processes but the last hold; 0 where they hold different lengths.
    """

    start: int
    length: int
    chunk: int


def _cuts(shape: tuple[int, ...], mesh: Any, placements: Sequence[Any]) -> dict[int, Cut]:
    cuts: dict[int, Cut] = {}
    for level, placement in enumerate(placements):
        if not placement.is_shard() or mesh.size(level) == 1:
            continue
        axis, count = placement.dim % len(shape), mesh.size(level)
        before = cuts.get(axis, Cut(0, shape[axis], shape[axis]))
        size = -(-before.length // count)
        first = min(size * mesh.get_local_rank(level), before.length)
        even = axis not in cuts or (before.chunk * count and shape[axis] % (before.chunk * count) == 0)
        cuts[axis] = Cut(before.start + first, min(size, before.length - first), size if even else 0)
    return cuts


def _require_known(placements: Sequence[Any], name: str) -> None:
    from torch.distributed.tensor import Replicate, Shard

    for placement in placements:
        if type(placement) not in (Replicate, Shard):
            raise ValueError(
                f"{name} is placed as {placement}; an optimizer of lowbit takes Replicate and Shard: redistribute the "
                "parameter, or shard each of its axes over one axis of the mesh"
            )
