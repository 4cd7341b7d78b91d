"""Helpers for data that all processes of ``torch.distributed`` compare or exchange."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = [
    "everywhere", "exchange_device", "gather_flat", "gathered", "launched", "processes", "same_random_numbers",
    "scatter_flat",
]  # fmt: skip


def processes() -> int:
    """The world size of ``torch.distributed``; 1 if it is not initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def launched() -> bool:
    """Whether ``torchrun``, or another launcher with the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def exchange_device() -> torch.device:
    """The device of tensors that the default process group exchanges: the CPU, if the group supports it.

    A group made for ``"nccl"`` only exchanges CUDA tensors; one made for ``"cpu:gloo,cuda:nccl"`` supports both.
    """
    devices = [pair.partition(":")[0] for pair in dist.get_backend_config().split(",")]
    return torch.device("cpu" if "cpu" in devices else devices[0])


def everywhere(holds: bool) -> bool:
    """Whether ``holds`` is true in all processes."""
    if processes() == 1:
        return holds
    votes = torch.tensor([holds], dtype=torch.int32, device=exchange_device())
    dist.all_reduce(votes, dist.ReduceOp.MIN)
    return bool(votes.all())


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Context in which torch's generator of the CPU has the state of the first process in all processes.

    All processes enter it together. Afterwards the generators of the others continue from their own states.
    """
    if processes() == 1 or dist.get_rank() == 0:
        _broadcast_random_state()
        yield
        return
    with torch.random.fork_rng([]):
        _broadcast_random_state()
        yield


def _broadcast_random_state() -> None:
    if processes() == 1:
        return
    state = torch.get_rng_state().to(exchange_device())
    dist.broadcast(state, 0)
    torch.set_rng_state(state.cpu())


def gathered(x: Tensor) -> list[Tensor]:
    """``x`` of each process, by rank."""
    if processes() == 1:
        return [x]
    copies = [torch.empty_like(x) for _ in range(processes())]
    dist.all_gather(copies, x)
    return copies


def gather_flat(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The flat ``x`` of all processes, concatenated by rank; all must have the same length."""
    out = x.new_empty(dist.get_world_size(group) * len(x))
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
    gather(out, x, group=group)
    return out


def scatter_flat(out: Tensor, x: Tensor, group: dist.ProcessGroup | None = None) -> dist.Work | None:
    """Begin to fill ``out`` with this process' part of the sum of the flat ``x``; wait for the returned work."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # renamed in torch 2.13
    work: dist.Work | None = scatter(out, x, group=group, async_op=True)
    return work
