"""Memory and time of each block of a model by an estimate, as tables from which checkpoints are planned.

A plan compares the tables of uniform options. Each needs one estimate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import nn

from lowbit.checkpointing.policies import POLICIES, Chosen
from lowbit.memory.estimator import Estimate
from lowbit.models.blocks import find_blocks

__all__ = ["KEEP", "BlockOptions", "BlockTable", "block_table", "blocks_of", "options_of", "parts_of"]

#: The option of a block that is not recomputed.
KEEP = "keep"


class BlockOptions(NamedTuple):
    """A policy of ``checkpoint_``: the option of each block, by path."""

    options: Mapping[str, str]

    def chosen(self, model: nn.Module) -> list[Chosen]:
        """Return the modules of ``model`` to checkpoint. Raise AttributeError if the model lacks one of the blocks."""
        rows = ((path, POLICIES[name]) for path, name in self.options.items() if name != KEEP)
        return [group for path, policy in rows for group in policy.of(model.get_submodule(path))]


def blocks_of(model: nn.Module) -> list[str]:
    """Return the paths of the blocks that ``checkpoint_`` finds."""
    names = {id(module): name for name, module in model.named_modules()}
    return list(dict.fromkeys(names[id(block)] for block in find_blocks(model)))


def options_of(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """Return the options that every block supports: ``KEEP``, and policies that act on single blocks."""
    modules = [model.get_submodule(path) for path in blocks]
    return [KEEP, *(name for name, row in POLICIES.items() if modules and all(map(row.of, modules)))]


@dataclass
class BlockTable:
    """Memory and time of B blocks.

    Attributes:
        kept: ``[B]`` bytes saved from a block's forward to its backward.
        inside: ``[B]`` most bytes held while a block runs, without those saved for earlier blocks.
        outside: ``[B + 1]`` most bytes held outside of blocks, by the number of blocks done, without those saved for
            them.
        recomputation: ``[B]`` seconds.
        seconds: Seconds of all ops.
        peak: Most bytes held.
    """

    kept: np.ndarray
    inside: np.ndarray
    outside: np.ndarray
    recomputation: np.ndarray
    seconds: float
    peak: float

    @property
    def peak_of_parts(self) -> float:
        """The most bytes held in and between blocks, which ``peak`` is for a table of an estimate."""
        before = np.append(0.0, np.cumsum(self.kept))
        return float(max((*(self.inside + before[:-1]), *(self.outside + before))))


def parts_of(usage: Estimate) -> list[range]:
    """Return the ops of each micro-batch of a step, without the optimizer's."""
    phases = [op.phase for op in usage.ops]
    end = next((i for i, phase in enumerate(phases) if phase == "step"), len(phases))
    starts = [i for i in range(1, end) if phases[i] == "forward" and phases[i - 1] in ("backward", "recomputation")]
    spans = [range(a, b) for a, b in zip([0, *starts], [*starts, end], strict=True)]
    return [span for span in spans if any(phases[i] == "backward" for i in span)]


def block_table(usage: Estimate, blocks: Sequence[str], within: range | None = None, timed: bool = True) -> BlockTable:
    """Return the table of an estimate, or of the ops in ``within``. If it is not ``timed``, times are 0."""
    within = range(len(usage.ops)) if within is None else within
    indices, known = {path: index for index, path in enumerate(blocks)}, dict[str, int | None]()

    def block_of(layer: str) -> int | None:
        if layer not in known:
            path = layer
            while path not in indices and "." in path:
                path = path.rpartition(".")[0]
            known[layer] = indices.get(path)
        return known[layer]

    count, timeline, ops = len(blocks), usage.timeline, usage.ops
    times = usage.op_seconds if timed else [0.0] * len(ops)
    backward = next((i for i in within if ops[i].phase == "backward"), within[-1])
    kept = np.zeros(count)
    for holding in usage.held_at(backward):
        block = block_of(holding.layer)
        if block is not None and holding.kind in ("activations", "weight copies", "temporaries"):
            kept[block] += holding.bytes
    before = np.append(0.0, np.cumsum(kept))
    inside, outside, recomputation, seconds, peak = np.zeros(count), np.zeros(count + 1), np.zeros(count), 0.0, 0.0
    blocks_done = 0
    for index in within:
        op, size = ops[index], timeline[index].bytes
        block = block_of(op.layer)
        if op.phase == "step":
            outside[0] = max(outside[0], size)
        elif block is None:
            outside[blocks_done] = max(outside[blocks_done], size - before[blocks_done])
        else:
            inside[block] = max(inside[block], size - before[block])
            blocks_done = block + 1 if op.phase == "forward" else block
        if block is not None and op.phase == "recomputation":
            recomputation[block] += times[index]
        seconds += times[index]
        peak = max(peak, size)
    return BlockTable(kept, inside, outside, recomputation, seconds, peak)
