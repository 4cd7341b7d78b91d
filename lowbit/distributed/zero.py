"""ZeRO's first stage: every process has all parameters, and the states of its share of each.

A share is some rows of a parameter, and a view of it: a step moves the share where the parameter lies, and the shares
of all processes are gathered afterwards.

Source: Rajbhandari et al., "ZeRO", arXiv 1910.02054, section 5.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from lowbit.distributed.parameters import named, replace_parameters, states_of, tree_of
from lowbit.processes import gather_flat

__all__ = ["SHARES", "Shares", "share_states_"]

#: The attribute of an optimizer that has its ``Shares``.
SHARES = "_lowbit_shares"
#: Shares are gathered in pieces of at most so many bytes, but of one parameter at least.
_TOGETHER = 32 << 20


def share_states_(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Let ``optimizer`` step this process' share of each parameter of ``model``, in place."""
    shares = Shares(model, optimizer, mesh)
    setattr(optimizer, SHARES, shares)
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    optimizer.zero_grad = MethodType(_zero_grad, optimizer)  # type: ignore[method-assign]


class Shares:
    """The shares of an optimizer. ``whole``: each parameter and its share. ``model``: has the shares by the names that
    the parameters have.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
        names, states = named(model), states_of(model, optimizer)
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.mesh = mesh
        self.whole = [(parameter, _share(parameter, mesh)) for parameter in stepped]
        self.model = tree_of({names[parameter]: share for parameter, share in self.whole})
        replace_parameters(optimizer, dict(self.whole), self.model, states)

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Rows of the parameters' gradients become the shares'."""
        for parameter, share in self.whole:
            if parameter.grad is not None:
                share.grad = _dtensor(_rows(parameter.grad, self.mesh), share)

    @torch.no_grad()
    def gather(self) -> None:
        """Every process has the rows of all others again."""
        moved = [(parameter, share) for parameter, share in self.whole if share.grad is not None]
        for share in self.model.parameters():
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
        if not alike or size + parameter.nbytes > _TOGETHER:
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


# -- the methods of an optimizer ---------------------------------------------------------------------------------------
def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if any(value is not None for value in (*args[1:], *kwargs.values())):
        raise ValueError(
            "step: an optimizer whose states are sharded takes no closure, as gradients are shared out before the "
            "step; call backward first, then step()"
        )
    getattr(optimizer, SHARES).take_gradients()


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    getattr(optimizer, SHARES).gather()


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    for parameter, _ in getattr(optimizer, SHARES).whole:
        if parameter.grad is not None and not set_to_none:
            parameter.grad.zero_()
        else:
            parameter.grad = None
