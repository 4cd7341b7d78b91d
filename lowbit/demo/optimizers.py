"""The optimizers of ``lowbit train``: ``lowbit.optim.names`` with the demo's betas."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowbit.optim.names import NamedOptimizer, find_optimizer
from lowbit.optim.shards import local

__all__ = ["find", "state_bytes"]

#: Betas by optimizer family; other families use their defaults.
_BETAS = {"adamw": (0.9, 0.95), "lion": (0.9, 0.98)}


def find(name: str) -> NamedOptimizer:
    """The optimizer called ``name``. Raises ValueError for an unknown name."""
    row = find_optimizer(name)
    betas = _BETAS.get(row.family)
    return row if betas is None else replace(row, make=partial(row.make, betas=betas))


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the optimizer states in this process."""
    states: Any = optimizer.state.values()
    return sum(local(t).nbytes for state in states for t in state.values() if isinstance(t, torch.Tensor))
