"""What an estimate says of the blocks of a model: what each keeps for backward, holds while it runs, and recomputes.

The choice of checkpoints is made of such tables, of the uniform options, one estimate each.
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

#: The option of a block of which nothing is recomputed.
KEEP = "keep"


class BlockOptions(NamedTuple):
    """Options by the paths of blocks, a policy of ``checkpoint_``."""

    options: Mapping[str, str]

    def chosen(self, model: nn.Module) -> list[Chosen]:
        """What of ``model`` is checkpointed. Raises AttributeError for a model without these blocks."""
        chosen = ((path, POLICIES[name]) for path, name in self.options.items() if name != KEEP)
        return [one for path, policy in chosen for one in policy.of(model.get_submodule(path))]


def blocks_of(model: nn.Module) -> list[str]:
    """The paths of the blocks that ``checkpoint_`` finds."""
    names = {id(module): name for name, module in model.named_modules()}
    return list(dict.fromkeys(names[id(block)] for block in find_blocks(model)))


def options_of(model: nn.Module, blocks: Sequence[str]) -> list[str]:
    """What can be done with every block: ``KEEP``, and the policies that act on single blocks."""
    modules = [model.get_submodule(path) for path in blocks]
    return [KEEP, *(name for name, row in POLICIES.items() if modules and all(map(row.of, modules)))]


@dataclass
class BlockTable:
    """Of B blocks: ``kept`` [B], bytes from the forward of each to its backward; ``inside`` [B], the most that is held
    while each runs, and ``outside`` [B + 1] while none does and so many are done, both without what blocks before keep;
    ``recomputation`` [B], seconds. ``seconds``: of all. ``peak``: the most that is held at all.
    """

    kept: np.ndarray
    inside: np.ndarray
    outside: np.ndarray
    recomputation: np.ndarray
    seconds: float
    peak: float


def parts_of(usage: Estimate) -> list[range]:
    """The ops of each micro-batch of a step, without the optimizer's."""
    phases = [op.phase for op in usage.ops]
    end = next((i for i, phase in enumerate(phases) if phase == "step"), len(phases))
    starts = [i for i in range(1, end) if phases[i] == "forward" and phases[i - 1] in ("backward", "recomputation")]
    spans = [range(a, b) for a, b in zip([0, *starts], [*starts, end], strict=True)]
    return [span for span in spans if any(phases[i] == "backward" for i in span)]


def block_table(usage: Estimate, blocks: Sequence[str], within: range | None = None) -> BlockTable:
    """The table of an estimate, or of the ops in ``within``."""
    within = range(len(usage.ops)) if within is None else within
    places, cache = {path: place for place, path in enumerate(blocks)}, dict[str, int | None]()

    def place_of(layer: str) -> int | None:
        if layer not in cache:
            path = layer
            while path not in places and "." in path:
                path = path.rpartition(".")[0]
            cache[layer] = places.get(path)
        return cache[layer]

    count, timeline, ops, times = len(blocks), usage.timeline, usage.ops, usage.op_seconds
    backward = next((i for i in within if ops[i].phase == "backward"), within[-1])
    kept = np.zeros(count)
    for holding in usage.held_at(backward):
        place = place_of(holding.layer)
        if place is not None and holding.kind in ("activations", "weight copies", "temporaries"):
            kept[place] += holding.bytes
    before = np.append(0.0, np.cumsum(kept))
    inside, outside, recomputation, seconds, peak = np.zeros(count), np.zeros(count + 1), np.zeros(count), 0.0, 0.0
    done = 0
    for index in within:
        op, held = ops[index], timeline[index].bytes
        place = place_of(op.layer)
        if op.phase == "step":
            outside[0] = max(outside[0], held)
        elif place is None:
            outside[done] = max(outside[done], held - before[done])
        else:
            inside[place] = max(inside[place], held - before[place])
            done = place + 1 if op.phase == "forward" else place
        if place is not None and op.phase == "recomputation":
            recomputation[place] += times[index]
        seconds += times[index]
        peak = max(peak, held)
    return BlockTable(kept, inside, outside, recomputation, seconds, peak)
