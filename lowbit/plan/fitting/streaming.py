"""Predicted memory of a step with streamed blocks (``lb.memory.stream_blocks_``), from a plain estimate.

On a CUDA device, memory holds the weights of the running block and of the next one, and the gradients of one block
until they are moved. On a CPU, weights are in files: the pages of the running block belong to the process, which the
allocator does not count but this does. The system reads the next block's pages ahead. A gradient is in memory until it
is moved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
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
    """Paths of the streamed blocks in the order of their calls, and whether they run on a CUDA device."""

    blocks: tuple[str, ...]
    cuda: bool

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, resident: int) -> Streaming:
        """Return the streaming of all blocks but the first ``resident`` ones."""
        return cls(tuple(blocks_of(model)[resident:]), device.type == "cuda")

    def applied(self, usage: Estimate) -> Estimate:
        """Return ``usage``, an estimate of forward and backward without an optimizer, with streamed blocks."""
        return usage.holding(self._held(usage))

    def moved(self, usage: Estimate) -> int:
        """Return the bytes of streamed weights."""
        return sum(self._sizes(usage).values())

    def _sizes(self, usage: Estimate) -> dict[str, int]:
        sizes = dict.fromkeys(self.blocks, 0)
        for holding in usage.holdings:
            if self._streamed(holding):
                sizes[unit_of(holding.layer, self.blocks)] += holding.bytes
        return sizes

    def _streamed(self, holding: Holding) -> bool:
        return holding.kind in _WEIGHTS and holding.bytes >= LEAST and bool(unit_of(holding.layer, self.blocks))

    def _held(self, usage: Estimate) -> Iterator[Holding]:
        sizes = list(self._sizes(usage).values())
        resident = max(sizes, default=0)
        if self.cuda:
            resident = max((a + b for a, b in pairwise(sizes)), default=resident)
        yield Holding(resident, "parameters", OUTSIDE, -1, math.inf)
        if self.cuda:
            yield Holding(max(sizes, default=0), "gradients", OUTSIDE, -1, math.inf)
        for holding in usage.holdings:
            if self._streamed(holding):
                continue
            if holding.kind == "gradients" and holding.bytes >= LEAST:
                holding = holding._replace(died=min(holding.died, holding.born + 1.25))
            yield holding
