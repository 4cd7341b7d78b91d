"""What a step holds whose blocks lie elsewhere (``lb.memory.stream_blocks_``): the estimate of one that has all in
memory, with what is not there taken away.

On a CUDA device weights of two blocks at a time are in memory, those of the one that computes and of the next, and a
gradient is there until its block's have been moved. On a CPU weights lie in files: pages of the block that computes are
the process's, which the allocator does not count and this does; those of the next the system reads ahead. A gradient is
there until it has been moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from lowbit.checkpointing.block_table import blocks_of
from lowbit.memory.estimator import Estimate
from lowbit.memory.ledger import OUTSIDE
from lowbit.memory.usage import Holding
from lowbit.offload.streaming import LEAST
from lowbit.plan.fitting.sharing import unit_of

__all__ = ["Streaming"]

_WEIGHTS = ("parameters", "buffers")


@dataclass(frozen=True)
class Streaming:
    """``blocks``: their paths, in the order in which they compute. ``cuda``: whether they compute on such a device."""

    blocks: tuple[str, ...]
    cuda: bool

    @classmethod
    def of(cls, model: nn.Module) -> Streaming:
        return cls(tuple(blocks_of(model)), any(parameter.is_cuda for parameter in model.parameters()))

    def applied(self, usage: Estimate) -> Estimate:
        """``usage``, which is of forward and backward without an optimizer, with its blocks elsewhere."""
        return usage.holding(self._held(usage))

    def moved(self, usage: Estimate) -> int:
        """The bytes of weights that lie elsewhere."""
        return sum(self._sizes(usage).values())

    def _sizes(self, usage: Estimate) -> dict[str, int]:
        sizes = dict.fromkeys(self.blocks, 0)
        for one in usage.holdings:
            if self._streamed(one):
                sizes[unit_of(one.layer, self.blocks)] += one.bytes
        return sizes

    def _streamed(self, one: Holding) -> bool:
        return one.kind in _WEIGHTS and one.bytes >= LEAST and bool(unit_of(one.layer, self.blocks))

    def _held(self, usage: Estimate) -> Iterator[Holding]:
        sizes = list(self._sizes(usage).values())
        resident = max(sizes, default=0)
        if self.cuda:
            resident = max((a + b for a, b in pairwise(sizes)), default=resident)
        yield Holding(resident, "parameters", OUTSIDE, -1, math.inf)
        if self.cuda:
            yield Holding(max(sizes, default=0), "gradients", OUTSIDE, -1, math.inf)
        for one in usage.holdings:
            if self._streamed(one):
                continue
            if one.kind == "gradients" and one.bytes >= LEAST:
                one = one._replace(died=min(one.died, one.born + 1.25))
            yield one
