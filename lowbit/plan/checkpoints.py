"""Per-block checkpointing for a memory budget, with the least time for recomputation.

For each option of each block, an estimate yields the bytes saved for backward, the peak while the block runs, and the
time of its recomputation. Dynamic programming over the blocks finds the optimum, up to the rounding of bytes. A final
estimate checks the result. If it is above the budget, the choice is repeated with a smaller target.

Source: Jain et al., "Checkmate", arXiv 1910.02653, poses the problem; here its units are blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lowbit.checkpointing.block_table import KEEP, BlockOptions, BlockTable, block_table, blocks_of, options_of
from lowbit.checkpointing.policies import POLICIES, Chosen
from lowbit.memory.estimator import Estimate
from lowbit.models.check import check_model
from lowbit.plan.step_estimate import estimate
from lowbit.sizes import amount, budget_in
from lowbit.tables import aligned

__all__ = ["CheckpointPlan", "Option", "best", "choices_of", "peak_of", "plan_checkpoints"]

#: Number of steps to which bytes are rounded in the dynamic program.
_STEPS = 4096

#: Attempts to find a choice that the final estimate confirms.
_REPAIRS = 6


class Option(NamedTuple):
    """One checkpointing option of one block.

    Attributes:
        name: Name of the policy, or ``KEEP``.
        saved: Bytes saved from forward to backward.
        inside: Peak bytes while the block runs, without the bytes that earlier blocks save.
        seconds: Time of the recomputation.
    """

    name: str
    saved: int
    inside: int
    seconds: float


class CheckpointPlan:
    """A checkpointing option for each block. ``checkpoint_(model, plan)`` applies it.

    Attributes:
        options: Name of the option by path of the block.
        peak_bytes: Estimated peak of a step.
        seconds: Estimated time of all recomputation in a step.
        budget: Limit on the peak.
        plain_bytes: Estimated peak without checkpoints.
        least_bytes: Smallest estimated peak of all options.
    """

    def __init__(
        self, options: Mapping[str, str], peak_bytes: int, seconds: float, plain: Estimate, budget: int, least: int
    ) -> None:
        self.options, self.peak_bytes, self.seconds = dict(options), peak_bytes, seconds
        self.budget, self.plain_bytes, self.least_bytes = budget, plain.peak_bytes, least

    def why(self, block: str) -> str:
        """Describe the option of the block with that path. Raises KeyError for an unknown path."""
        name = self.options[block]
        about = "all its activations are saved" if name == KEEP else f"backward recomputes {POLICIES[name].about}"
        return f"{block}: {name}, {about}"

    def chosen(self, model: nn.Module) -> list[Chosen]:
        """Return the checkpointed modules of ``model``. Raises AttributeError for a model without these blocks."""
        return BlockOptions(self.options).chosen(model)

    def __str__(self) -> str:
        rows = [("block", "option"), *self.options.items()]
        return (
            f"budget {amount(self.budget)}: peak {amount(self.peak_bytes)} instead of {amount(self.plain_bytes)}, "
            f"{1e3 * self.seconds:.1f} ms of recomputation per step (estimated)\n{aligned(rows)}"
        )


def plan_checkpoints(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = "adamw",
    **settings: Any,
) -> CheckpointPlan:
    """Choose a checkpointing option for each block, so that a step fits the budget in the least time.

    Nothing is computed, and ``model`` does not change.

    Args:
        model: Module to train. Its blocks are found as by ``checkpoint_``.
        batch: Batch, as for ``lb.estimate``.
        budget: Limit on the peak of the step, parameters and optimizer states included: bytes, a size such as
            ``"8GB"``, or a share of the peak without checkpoints such as ``"80%"``.
        loss: Loss, as for ``lb.estimate``.
        optimizer: Optimizer, as for ``lb.estimate``.
        settings: Other arguments of ``lb.estimate``.

    Returns:
        The plan, which is a policy for ``checkpoint_``.

    Raises:
        ValueError: If no choice fits (the error names the smallest peak), for a model without blocks, and as
            ``lb.estimate``.
    """
    check_model(model)
    limit = budget_in(budget, "memory.plan_checkpoints")
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            f"memory.plan_checkpoints: {type(model).__name__} has no ModuleList or Sequential of two or more modules "
            f"of one class to plan for; pass checkpoint_ a list of modules or patterns"
        )

    def estimated(names: Mapping[str, str]) -> Estimate:
        return estimate(model, batch, loss, optimizer=optimizer, checkpoint=BlockOptions(names), **settings)

    usages = {name: estimated(dict.fromkeys(blocks, name)) for name in options_of(model, blocks)}
    plain = usages[KEEP]
    allowed = limit.of(plain.peak_bytes)
    options, outside = choices_of({name: block_table(usage, blocks) for name, usage in usages.items()})
    least = min(usage.peak_bytes for usage in usages.values())
    target = allowed
    for _ in range(_REPAIRS):
        names = best(options, outside, target)
        if names is None:
            break
        by_block = dict(zip(blocks, names, strict=True))
        checked = estimated(by_block)
        if checked.peak_bytes <= allowed:
            seconds = checked.seconds_by_phase.get("recomputation", 0.0)
            return CheckpointPlan(by_block, checked.peak_bytes, seconds, plain, allowed, least)
        target -= checked.peak_bytes - allowed
    smallest = min(usages.values(), key=lambda usage: usage.peak_bytes)
    raise ValueError(
        f"memory.plan_checkpoints: no choice of checkpoints fits a step into {amount(allowed)}; the smallest peak is "
        f"{amount(least)}, in {smallest.peak_event}. Raise the budget, use micro-batches or an 8-bit optimizer, or "
        f"offload optimizer states"
    )


def choices_of(tables: Mapping[str, BlockTable]) -> tuple[list[list[Option]], list[int]]:
    """Return the options of each block, and the bytes held outside of blocks, from one table per option."""
    rows = [
        [Option(name, int(t.kept[block]), int(t.inside[block]), float(t.recomputation[block]))
         for name, t in tables.items()]
        for block in range(len(tables[KEEP].kept))
    ]  # fmt: skip
    return rows, [int(size) for size in np.max([t.outside for t in tables.values()], axis=0)]


def best(options: Sequence[Sequence[Option]], outside: Sequence[int], budget: int) -> list[str] | None:
    """Return the option of each block with the least total time whose peak is at most ``budget``.

    Args:
        options: Options of each block, in the order of the blocks.
        outside: Bytes held between blocks, by the number of finished blocks, without the bytes that these save.
        budget: Limit on the peak. While a block runs, it holds ``inside`` and the bytes that earlier blocks save.

    Returns:
        Names of the options, or None if no choice fits.
    """
    width = max(budget // _STEPS, 1)
    # By rounded saved bytes: the time, the saved bytes, and the choices so far.
    states: dict[int, tuple[float, int, tuple[Any, ...]]] = {0: (0.0, 0, ())}
    if outside[0] > budget:
        return None
    for block, choices in enumerate(options):
        following: dict[int, tuple[float, int, tuple[Any, ...]]] = {}
        for seconds, saved, path in states.values():
            for option in choices:
                total = saved + option.saved
                if saved + option.inside > budget or total + outside[block + 1] > budget:
                    continue
                reached = (seconds + option.seconds, total, (option.name, path))
                key = total // width
                if key not in following or reached[:2] < following[key][:2]:
                    following[key] = reached
        states = _undominated(following)
    if not states:
        return None
    path = min(states.values(), key=lambda state: state[:2])[2]
    names: list[str] = []
    while path:
        names.append(path[0])
        path = path[1]
    return names[::-1]


def peak_of(chosen: Sequence[Option], outside: Sequence[int]) -> int:
    """Return the peak bytes with these options of the blocks."""
    saved, peak = 0, outside[0]
    for block, option in enumerate(chosen):
        peak = max(peak, saved + option.inside)
        saved += option.saved
        peak = max(peak, saved + outside[block + 1])
    return peak


def _undominated(states: dict[int, tuple[float, int, Any]]) -> dict[int, tuple[float, int, Any]]:
    """Return the states for which no other is both smaller and faster."""
    frontier, fastest = {}, math.inf
    for key in sorted(states):
        if states[key][0] < fastest:
            frontier[key], fastest = states[key], states[key][0]
    return frontier
