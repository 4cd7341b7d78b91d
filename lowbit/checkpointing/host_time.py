"""What a checkpoint takes of the host's time beside the ops that it computes again."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn

from lowbit.checkpointing.apply import checkpoint_
from lowbit.machine import fastest

__all__ = ["overhead"]

#: Ops of each of two blocks that are computed again.
_OPS = 50


class _Block(nn.Module):
    """Small ops, one after the other, whose backward takes what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))  # blocks that a model repeats have parameters

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(_OPS):
            x = x.sin()
        return x


@cache
def overhead(selective: bool) -> float:
    """Seconds an op, of what Python notes in forward and compares in backward; measured once a process.

    ``selective``: where the results of products are kept, which are looked for at each op.
    """
    plain, checkpointed = (nn.Sequential(_Block(), _Block()) for _ in range(2))
    checkpoint_(checkpointed, "save_matmuls" if selective else "block")

    with torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(4, requires_grad=True)

        def trained(model: nn.Module) -> float:
            return fastest(lambda: model(x).sum().backward())

        again = fastest(lambda: plain(x))
        return max(trained(checkpointed) - trained(plain) - again, 0.0) / (2 * _OPS)
