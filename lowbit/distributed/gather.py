"""Undoes sharding in the first process, in which a trained model is saved."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lowbit.dist_utils import processes
from lowbit.distributed.zero import SHARES
from lowbit.optim.shards import is_dtensor, whole

__all__ = ["gather_in_first"]


@torch.no_grad()
def gather_in_first(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Give the first process whole parameters, and whole masters in the optimizer, in place.

    All processes call it after training. The model of the first process then has its classes from before ``shard_``,
    and ``lb.train.unmixed_`` finds its masters. Neither model trains afterwards.

    Args:
        model: The model inside the wrapper that ``shard_`` returned.
        optimizer: Its optimizer.
    """
    is_first = processes() == 1 or dist.get_rank() == 0
    for parameter, share in getattr(getattr(optimizer, SHARES, None), "pairs", ()):
        masters = {name: whole(value) for name, value in optimizer.state[share].items() if name == "master"}
        if is_first and masters:
            optimizer.state[parameter].update({name: value.view_as(parameter) for name, value in masters.items()})
    units: list[Any] = [module for module in model.modules() if hasattr(module, "reshard")]
    for unit in units:
        unit.reshard()
    gathered: dict[Tensor, nn.Parameter] = {}  # tied parameters stay tied
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_dtensor(parameter):
                continue
            if parameter not in gathered:
                full = whole(parameter)
                gathered[parameter] = nn.Parameter(full, parameter.requires_grad) if is_first else parameter
            module._parameters[name] = gathered[parameter]
    for unit in units if is_first else ():
        unit.__class__ = _before(type(unit))


def _before(cls: Any) -> Any:
    """The class of which ``fully_shard`` made ``cls``."""
    return cls.__bases__[-1]
