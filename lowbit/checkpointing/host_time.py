"""Measures the Python time of a checkpoint beyond that of the recomputed ops."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from lowbit.checkpointing.apply import checkpoint_
from lowbit.machine import fastest

__all__ = ["overhead"]

#: Recomputed ops in each of the two blocks.
_OPS = 50


class _Block(nn.Module):
    """Consecutive small ops that save their inputs for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))  # modules without parameters are not found as blocks

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(_OPS):
            x = x.sin()
        return x


@cache
def overhead(selective: bool) -> float:
    """Return the Python time of a checkpoint in seconds per op, measured once per process.

    Args:
        selective: Whether results of matmuls are saved, which needs a check of each op.
    """
    plain, checkpointed = (nn.Sequential(_Block(), _Block()) for _ in range(2))
    checkpoint_(checkpointed, "save_matmuls" if selective else "block")

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(4, requires_grad=True)

        def step_seconds(model: nn.Module) -> float:
            return fastest(lambda: model(x).sum().backward())

        forward_seconds = fastest(lambda: plain(x))
        return max(step_seconds(checkpointed) - step_seconds(plain) - forward_seconds, 0.0) / (2 * _OPS)
