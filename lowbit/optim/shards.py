"""Shards of parameters: the position of a process' part in the full tensor, and tensors sharded like it.

A parameter is a tensor, or a DTensor that is replicated or sharded along its axes. Blocks and random bits are counted
along the full flattened tensor, so a part knows the offsets of its rows there.
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
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # imported if there are DTensors
    return module is not None and isinstance(x, module.DTensor)


def local(x: Tensor) -> Tensor:
    """This process' shard of a tensor, detached."""
    part: Tensor = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return part.detach()


def whole(x: Tensor) -> Tensor:
    """The full tensor, detached. If it is sharded, all processes must call this."""
    full: Tensor = x.full_tensor() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return full.detach()


def gradient(param: Tensor) -> Tensor:
    """This process' shard of the gradient, sharded like the parameter."""
    grad = param.grad
    assert grad is not None
    if is_dtensor(param) and grad.placements != param.placements:  # type: ignore[attr-defined]
        grad = grad.redistribute(param.device_mesh, param.placements)  # type: ignore[attr-defined]
    return local(grad)


@dataclass(frozen=True)
class Part:
    """This process' part of a tensor.

    Attributes:
        shape: Of the full tensor; ``(1,)`` for a scalar.
        rows: Rows of the part.
        cols: Consecutive elements of each row.
        offset: Index of the first element in the full flattened tensor.
        pitch: Row i begins at index ``offset + i * pitch``.
        cuts: The cut of each sharded axis.
        groups: Process groups that the tensor is sharded over.
        mesh: Of a DTensor.
        placements: Of a DTensor.
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
        """The part of the parameter ``x``, called ``name`` in messages.

        Raises:
            ValueError: The DTensor's placement is not supported.
        """
        shape = tuple(x.shape) or (1,)
        if not is_dtensor(x):
            return cls(shape, 1, prod(shape), 0, max(prod(shape), 1))
        mesh, placements = x.device_mesh, tuple(x.placements)  # type: ignore[attr-defined]
        _require_known(placements, name)
        return cls._placed(shape, mesh, placements, name)

    @classmethod
    def _placed(cls, shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...], name: str) -> Part:
        cuts = _cuts(shape, mesh, placements)
        axes = sorted(cuts)
        if any(prod(shape[:axis]) > 1 for axis in axes[:-1]):
            raise ValueError(
                f"{name} {list(shape)} is sharded along its axes {axes}; lowbit optimizers support sharding along one "
                "axis, or along the first axis and another one"
            )
        last = axes[-1] if axes else 0
        sizes = [cuts[axis].length if axis in cuts else size for axis, size in enumerate(shape)]
        offset = sum(cuts[axis].start * prod(shape[axis + 1 :]) for axis in axes)
        groups = tuple(
            mesh.get_group(level) for level, p in enumerate(placements) if p.is_shard() and mesh.size(level) > 1
        )
        pitch = max(prod(shape[last:]), 1)
        return cls(shape, prod(sizes[:last]), prod(sizes[last:]), offset, pitch, cuts, groups, mesh, placements)

    def of_state(self, shape: Sequence[int]) -> Part:
        """The part of a state of ``shape``. A state of another shape than the parameter's is sharded by rows."""
        size = tuple(shape)
        if size == self.shape:
            return self
        if self.mesh is None:
            return Part(size, 1, prod(size), 0, max(prod(size), 1))
        from torch.distributed.tensor import Shard

        placements = tuple(Shard(0) if placement.is_shard() else placement for placement in self.placements)
        return self._placed(size, self.mesh, placements, "")

    @property
    def is_matrix(self) -> bool:
        """Whether the full tensor has more than one axis."""
        return len(self.shape) > 1

    @property
    def numel(self) -> int:
        """Number of elements on this process."""
        return self.rows * self.cols

    def holds_blocks(self, block: int) -> bool:
        """Whether no block of ``block`` consecutive elements spans the parts of several processes."""
        last = max(self.cuts, default=0)
        return all(
            cut.chunk * prod(self.shape[axis + 1 :]) % block == 0 and cut.chunk > 0 for axis, cut in self.cuts.items()
        ) and (prod(self.shape[:last]) == 1 or self.pitch % block == 0)

    def cuts_alike(self, shape: Sequence[int]) -> bool:
        """Whether a tensor of ``shape``, with one element per several consecutive elements, has the same cuts."""
        if not self.cuts:
            return True
        if max(self.cuts) >= len(shape):
            return False
        per, cuts = prod(self.shape) // max(prod(shape), 1), _cuts(tuple(shape), self.mesh, self.placements)
        return all(
            cuts[axis].chunk * prod(shape[axis + 1 :]) * per == cut.chunk * prod(self.shape[axis + 1 :])
            and cut.chunk > 0
            for axis, cut in self.cuts.items()
        )

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of this process' shard of a tensor of ``shape`` with the parameter's placements."""
        cuts = self._cuts_of(shape)
        return tuple(cuts[axis].length if axis in cuts else size for axis, size in enumerate(shape))

    def shard_of(self, x: Tensor) -> Tensor:
        """This process' part of a full tensor."""
        for axis, cut in self._cuts_of(x.shape).items():
            x = x.narrow(axis, cut.start, cut.length)
        return x

    def _cuts_of(self, shape: Sequence[int]) -> dict[int, Cut]:
        return _cuts(tuple(shape), self.mesh, self.placements) if self.cuts else {}

    def tensor(self, shard: Tensor, shape: Sequence[int]) -> Tensor:
        """The tensor of ``shape`` with the parameter's placements and this process' ``shard``."""
        if self.mesh is None:
            return shard
        from torch.distributed.tensor import DTensor

        strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
        return DTensor.from_local(
            shard, self.mesh, self.placements, run_check=False, shape=torch.Size(shape), stride=strides
        )

    def indices(self, device: torch.device) -> Tensor:
        """int64 ``[rows, cols]``: the index of every element in the full flattened tensor."""
        rows, cols = (torch.arange(count, device=device) for count in (self.rows, self.cols))
        return self.offset + rows[:, None] * self.pitch + cols


@dataclass(frozen=True)
class Cut:
    """A sharded axis: this process has ``length`` entries from ``start`` on.

    ``chunk`` is the length on all processes but the last, or 0 if lengths differ.
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
                f"{name} has the placement {placement}; lowbit optimizers support Replicate and Shard: redistribute "
                "the parameter, or shard each of its axes over one axis of the mesh"
            )
