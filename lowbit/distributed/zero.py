"""ZeRO stage 1: every process has all parameters, but optimizer states only for its share of each.

A share is a view of some rows of a parameter. The step updates the share in place, and all shares are gathered
afterwards.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowbit.dist_utils import gather_flat
from lowbit.distributed.parameters import begin_with, named, states_of, tree_of
from lowbit.optim.plain import WeakMethod, plain_step, replace_step_, require_own_step
from lowbit.optim.shards import is_dtensor, local

__all__ = ["BUCKET_BYTES", "SHARES", "Shares", "as_shard", "in_buckets", "rows_of", "rows_per_process", "share_states_"]

#: The attribute of an optimizer with its ``Shares``.
SHARES = "_lowbit_shares"
#: Shares are gathered in buckets of up to this many bytes, at least one parameter each.
BUCKET_BYTES = 32 << 20
#: Methods of torch's and lowbit's optimizers that use states.
_OF_STATES = ("state_dict", "load_state_dict", "stored_states", "torch_state_dict")


def share_states_(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, bucket: int | None = None
) -> None:
    """Make ``optimizer`` step this process' share of each parameter of ``model``, in place.

    Shares are gathered in buckets of ``bucket`` bytes, by default ``BUCKET_BYTES``.

    Between steps its groups have the full parameters, so that scaling, clipping and ``zero_grad`` see full gradients.
    """
    require_own_step(optimizer, "distributed.shard_")
    shares = Shares(model, optimizer, mesh, bucket or BUCKET_BYTES)
    setattr(optimizer, SHARES, shares)
    replace_step_(optimizer, shares.step, "distributed.shard_")
    for name in _OF_STATES:
        if hasattr(optimizer, name):
            setattr(optimizer, name, WeakMethod(partial(_with_shares, name), optimizer))


class Shares:
    """The shares of an optimizer.

    Attributes:
        pairs: Each parameter and its share.
        model: A module with the shares, by the names of the parameters.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, bucket: int) -> None:
        names, states = named(model), states_of(model, optimizer)
        self.mesh, self._bucket, self._stepped = mesh, bucket, False
        self.pairs = [(p, _share(p, mesh)) for group in optimizer.param_groups for p in group["params"]]
        self.model = tree_of({names[parameter]: share for parameter, share in self.pairs})
        with self.stepped(optimizer):
            begin_with(optimizer, dict(self.pairs), self.model, states)

    @contextmanager
    def stepped(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """A context in which the optimizer's groups have the shares in place of the parameters."""
        if self._stepped:
            yield
            return
        before, shares = [group["params"] for group in optimizer.param_groups], dict(self.pairs)
        for group in optimizer.param_groups:
            group["params"] = [shares.get(parameter, parameter) for parameter in group["params"]]
        self._stepped = True
        try:
            yield
        finally:
            self._stepped = False
            for group, params in zip(optimizer.param_groups, before, strict=True):
                group["params"] = params

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the shares, and gather them to all processes."""
        pairs = [(parameter, share) for parameter, share in self.pairs if parameter.grad is not None]
        try:
            for parameter, share in pairs:
                share.grad = _shared(parameter.grad, share, self.mesh)
            with self.stepped(optimizer):
                plain_step(optimizer)
        finally:
            for _, share in pairs:
                share.grad = None
        for bucket in in_buckets([parameter for parameter, _ in pairs], self._bucket):
            _gather(bucket, self.mesh)


# -- shares -----------------------------------------------------------------------------------------------------------
def rows_per_process(tensor: Tensor, count: int) -> int:
    """The rows in the share of the first of ``count`` processes. The last ones may have fewer, or none."""
    return -(-(len(tensor) if tensor.dim() else 1) // count)


def rows_of(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A view of this process' rows. A scalar belongs to the first process."""
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    each = rows_per_process(tensor, mesh.size())
    return rows[mesh.get_local_rank() * each : (mesh.get_local_rank() + 1) * each]


def as_shard(rows: Tensor, shape: Sequence[int], mesh: DeviceMesh) -> DTensor:
    """A DTensor of this shape, from this process' rows."""
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return DTensor.from_local(rows, mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides)


def _share(parameter: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    share = as_shard(rows_of(parameter.detach(), mesh), tuple(parameter.shape) or (1,), mesh)
    return nn.Parameter(share, requires_grad=parameter.requires_grad)


def _shared(gradient: Tensor, share: Tensor, mesh: DeviceMesh) -> Tensor:
    """The gradient of a share; ``gradient`` is whole, or sharded by ``zero2-replicated``."""
    if is_dtensor(gradient) and gradient.dim():
        return gradient
    return as_shard(rows_of(local(gradient), mesh), share.shape, mesh)


def in_buckets(parameters: Iterable[Tensor], limit: int) -> list[list[Tensor]]:
    """The parameters in buckets of up to ``limit`` bytes, at least one parameter each.

    A bucket has one dtype and one device. Within it parameters are in the given order; buckets are in the order of
    their first parameters.
    """
    buckets: list[list[Tensor]] = []
    newest: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    room: dict[tuple[torch.dtype, torch.device], int] = {}
    for parameter in parameters:
        key = parameter.dtype, parameter.device
        if key not in newest or parameter.nbytes > room[key]:
            newest[key], room[key] = [], limit
            buckets.append(newest[key])
        newest[key].append(parameter)
        room[key] -= parameter.nbytes
    return buckets


def _gather(bucket: list[Tensor], mesh: DeviceMesh) -> None:
    """All-gather the rows of these parameters at once; every process sends as many bytes as the first."""
    count = mesh.size()
    sizes = [max(1, rows_per_process(p, count)) * p.shape[1:].numel() for p in bucket]
    sent = bucket[0].new_zeros(sum(sizes))
    for parameter, target in zip(bucket, sent.split(sizes), strict=True):
        rows = rows_of(parameter, mesh)
        target[: rows.numel()].copy_(rows.reshape(-1))
    gathered = gather_flat(sent, mesh.get_group()).view(count, -1)
    for parameter, parts in zip(bucket, gathered.split(sizes, 1), strict=True):
        parameter.copy_(parts.reshape(-1)[: parameter.numel()].view(parameter.shape))


def _with_shares(name: str, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the optimizer's class while its groups have the shares."""
    with getattr(optimizer, SHARES).stepped(optimizer):
        result = getattr(type(optimizer), name)(optimizer, *args, **kwargs)
        return list(result) if isinstance(result, Iterator) else result
