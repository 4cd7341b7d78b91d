"""ZeRO's first stage: every process has all parameters, and the states of its share of each.

A share is some rows of a parameter, and a view of it: a step moves the share where the parameter lies, and the shares
of all processes are gathered afterwards.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

__all__ = ["BUCKET_BYTES", "SHARES", "Shares", "share_states_"]

#: The attribute of an optimizer that has its ``Shares``.
SHARES = "_lowbit_shares"
#: Shares are gathered in pieces of at most so many bytes, but of one parameter at least.
BUCKET_BYTES = 32 << 20
#: Methods of optimizers, torch's and those of lowbit, that look at states.
_OF_STATES = ("state_dict", "load_state_dict", "stored_states", "torch_state_dict")


def share_states_(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Let ``optimizer`` step this process' share of each parameter of ``model``, in place.

    Between steps its groups have the parameters, so that scaling, clipping and ``zero_grad`` see whole gradients.
    """
    require_own_step(optimizer, "distributed.shard_")
    shares = Shares(model, optimizer, mesh)
    setattr(optimizer, SHARES, shares)
    replace_step_(optimizer, shares.step, "distributed.shard_")
    for name in _OF_STATES:
        if hasattr(optimizer, name):
            setattr(optimizer, name, WeakMethod(partial(_with_shares, name), optimizer))


class Shares:
    """The shares of an optimizer. ``whole``: each parameter and its share. ``model``: has the shares by the names that
    the parameters have.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        names, states = named(model), states_of(model, optimizer)
        self.mesh, self._stepped = mesh, False
        self.whole = [(p, _share(p, mesh)) for group in optimizer.param_groups for p in group["params"]]
        self.model = tree_of({names[parameter]: share for parameter, share in self.whole})
        with self.stepped(optimizer):
            begin_with(optimizer, dict(self.whole), self.model, states)

    @contextmanager
    def stepped(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within, the shares are what the optimizer steps and has states of."""
        if self._stepped:
            yield
            return
        before, shares = [group["params"] for group in optimizer.param_groups], dict(self.whole)
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
        """The optimizer's step of the shares, after which every process has the rows of all others."""
        moved = [(parameter, share) for parameter, share in self.whole if parameter.grad is not None]
        try:
            for parameter, share in moved:
                share.grad = _dtensor(_rows(parameter.grad, self.mesh), share)
            with self.stepped(optimizer):
                plain_step(optimizer)
        finally:
            for _, share in moved:
                share.grad = None
        for pieces in _pieces(moved):
            _gather(pieces, self.mesh)


# -- shares -----------------------------------------------------------------------------------------------------------
def _rows(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """A view of this process' rows; of a number, the first process has it."""
    rows = tensor.reshape(1) if tensor.dim() == 0 else tensor
    each = -(-len(rows) // mesh.size())
    return rows[mesh.get_local_rank() * each : (mesh.get_local_rank() + 1) * each]


def _share(parameter: Tensor, mesh: DeviceMesh) -> nn.Parameter:
    shape = tuple(parameter.shape) or (1,)
    strides = tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))
    made = DTensor.from_local(
        _rows(parameter.detach(), mesh), mesh, [Shard(0)], run_check=False, shape=torch.Size(shape), stride=strides
    )
    return nn.Parameter(made, requires_grad=parameter.requires_grad)


def _dtensor(rows: Tensor, like: Any) -> DTensor:
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def _pieces(moved: Sequence[tuple[Tensor, nn.Parameter]]) -> list[list[tuple[Tensor, nn.Parameter]]]:
    """Those of one dtype and device together, up to so many bytes."""
    found: list[list[tuple[Tensor, nn.Parameter]]] = []
    size = 0
    for parameter, share in sorted(moved, key=lambda one: (str(one[0].dtype), str(one[0].device))):
        last = found[-1][0][0] if found else None
        alike = last is not None and (last.dtype, last.device) == (parameter.dtype, parameter.device)
        if not alike or size + parameter.nbytes > BUCKET_BYTES:
            found.append([])
            size = 0
        found[-1].append((parameter, share))
        size += parameter.nbytes
    return found


def _gather(pieces: list[tuple[Tensor, nn.Parameter]], mesh: DeviceMesh) -> None:
    """One gather of the rows of these parameters, in which every process sends as much as the first."""
    count, first = mesh.size(), pieces[0][0]
    sizes = [-(-max(1, len(p) if p.dim() else 1) // count) * (p[0].numel() if p.dim() else 1) for p, _ in pieces]
    sent = first.new_zeros(sum(sizes))
    for (parameter, _), place in zip(pieces, sent.split(sizes), strict=True):
        mine = _rows(parameter, mesh)
        place[: mine.numel()].copy_(mine.reshape(-1))
    got = gather_flat(sent, mesh.get_group()).view(count, -1)
    for (parameter, _), parts in zip(pieces, got.split(sizes, 1), strict=True):
        parameter.copy_(parts.reshape(-1)[: parameter.numel()].view(parameter.shape))


def _with_shares(name: str, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    """A method of the optimizer's class while the shares are what it steps."""
    with getattr(optimizer, SHARES).stepped(optimizer):
        found = getattr(type(optimizer), name)(optimizer, *args, **kwargs)
        return list(found) if isinstance(found, Iterator) else found
