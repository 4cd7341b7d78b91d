"""The processes of ``torch.distributed`` that look at data together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["everywhere", "exchange_device", "gather_flat", "gathered", "processes"]


def processes() -> int:
    """How many processes of ``torch.distributed`` run together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def exchange_device() -> torch.device:
    """Where a tensor has to be for the default process group to exchange it: the CPU, unless the group serves none.

    A group made for ``"nccl"`` alone exchanges CUDA tensors only; one made for ``"cpu:gloo,cuda:nccl"`` takes both.
    """
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def everywhere(holds: bool) -> bool:
    """Whether ``holds`` is true in every process."""
    if processes() == 1:
        return holds
    votes = torch.tensor([holds], dtype=torch.int32, device=exchange_device())
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.all())


def gathered(x: Tensor) -> list[Tensor]:
    """``x`` of each process, in their order."""
    if processes() == 1:
        return [x]
    copies = [torch.empty_like(x) for _ in range(processes())]
    dist.all_gather(copies, x)
    return copies


def gather_flat(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The flat ``x`` of each process, one after the other; all have as many elements."""
    found = x.new_empty(dist.get_world_size(group) * len(x))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on
    gather(found, x, group=group)
    return found
