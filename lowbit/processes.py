"""The processes of ``torch.distributed`` that look at data together."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["everywhere", "gathered", "processes"]


def processes() -> int:
    """How many processes of ``torch.distributed`` run together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def everywhere(holds: bool) -> bool:
    """Whether ``holds`` is true in every process."""
    if processes() == 1:
        return holds
    votes = torch.tensor([holds], dtype=torch.int32)
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.all())


def gathered(x: Tensor) -> list[Tensor]:
    """``x`` of each process, in their order."""
    if processes() == 1:
        return [x]
    copies = [torch.empty_like(x) for _ in range(processes())]
    dist.all_gather(copies, x)
    return copies
