"""Checkpoints for a budget: which parts of each block to recompute, so that a step fits and takes the least time.

An estimate of every option says, for each block, the bytes that it keeps for backward, the most that is held while it
runs, and the time of its recomputation. The choice is exact but for the rounding of bytes: a table over the blocks, of
the least time for what all blocks up to there keep. A last estimate checks it, and where it is above the budget the
choice is made again with less.

Source: Jain et al., "Checkmate", arXiv 1910.02653, poses the problem; here blocks are its units.
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

#: Steps into which bytes are rounded while choices are compared.
_STEPS = 4096

#: How often a choice that an estimate finds above the budget is made again.
_REPAIRS = 6


class Option(NamedTuple):
    """One option of one block. ``kept``: bytes from its forward to its backward. ``inside``: the most that is held
    while it runs, without what earlier blocks keep. ``seconds``: of its recomputation.
    """

    name: str
    kept: int
    inside: int
    seconds: float


class CheckpointPlan:
    """What to do with each block. ``peak_bytes``: estimated, of a step. ``seconds``: of all recomputation in a step,
    estimated. ``options``: by the path of the block the name of its option. ``checkpoint_(model, plan)`` does it.
    """

    def __init__(
        self, options: Mapping[str, str], peak_bytes: int, seconds: float, plain: Estimate, budget: int, least: int
    ) -> None:
        self.options, self.peak_bytes, self.seconds = dict(options), peak_bytes, seconds
        self.budget, self.plain_bytes, self.least_bytes = budget, plain.peak_bytes, least

    def why(self, block: str) -> str:
        """The reason of what is done with the block of that path. Raises KeyError for one that the plan has not."""
        name = self.options[block]
        about = "all that backward needs of it is kept" if name == KEEP else f"of {POLICIES[name].about}"
        return f"{block}: {name}, {about}"

    def chosen(self, model: nn.Module) -> list[Chosen]:
        """What of ``model`` is checkpointed. Raises AttributeError for a model without these blocks."""
        return BlockOptions(self.options).chosen(model)

    def __str__(self) -> str:
        rows = [("block", "option"), *self.options.items()]
        return (
            f"budget {amount(self.budget)}: peak {amount(self.peak_bytes)} instead of {amount(self.plain_bytes)}, "
            f"{1e3 * self.seconds:.1f} ms of recomputation a step (estimated)\n{aligned(rows)}"
        )


def plan_checkpoints(
    model: nn.Module,
    batch: Any,
    budget: str | int,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Any = "adamw",
    **settings: Any,
) -> CheckpointPlan:
    """Choose what to recompute of each block, so that a step holds at most ``budget`` and takes the least time.

    ``budget``: of the whole step, parameters and states included: bytes, a size such as ``"8GB"``, or a share of the
    peak without checkpoints, ``"80%"``. ``batch``, ``loss``, ``optimizer`` and ``settings`` are those of ``estimate``:
    what the model is trained with. Blocks are those of ``checkpoint_``. Nothing is computed, and ``model`` stays.

    Raises ValueError where no choice fits (it says what would), for a model without blocks, and as ``estimate``.
    """
    check_model(model)
    limit = budget_in(budget, "memory.plan_checkpoints")
    blocks = blocks_of(model)
    if not blocks:
        raise ValueError(
            f"memory.plan_checkpoints: {type(model).__name__} has no ModuleList or Sequential of two or more modules "
            f"of one class to plan for; give checkpoint_ a list of modules or patterns"
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
        found = dict(zip(blocks, names, strict=True))
        checked = estimated(found)
        if checked.peak_bytes <= allowed:
            seconds = checked.seconds_by_phase.get("recomputation", 0.0)
            return CheckpointPlan(found, checked.peak_bytes, seconds, plain, allowed, least)
        target -= checked.peak_bytes - allowed
    smallest = min(usages.values(), key=lambda usage: usage.peak_bytes)
    raise ValueError(
        f"memory.plan_checkpoints: a step fits into {amount(allowed)} by no choice of checkpoints; the least is "
        f"{amount(least)}, in {smallest.peak_event}. Ask for as much, take a smaller batch with accumulation, an "
        f"optimizer of fewer bits, or offload its states"
    )


def choices_of(tables: Mapping[str, BlockTable]) -> tuple[list[list[Option]], list[int]]:
    """The options of each block, of the tables of models in which all blocks have one, and what is held outside."""
    rows = [
        [Option(name, int(t.kept[place]), int(t.inside[place]), float(t.recomputation[place]))
         for name, t in tables.items()]
        for place in range(len(tables[KEEP].kept))
    ]  # fmt: skip
    return rows, [int(most) for most in np.max([t.outside for t in tables.values()], axis=0)]


def best(options: Sequence[Sequence[Option]], outside: Sequence[int], budget: int) -> list[str] | None:
    """The option of each block, in their order, of the least time in all such that at no moment more than ``budget``
    is held: while block b runs its ``inside`` and what blocks before it keep; outside, with b blocks done,
    ``outside[b]`` and what these keep. None where there is no such choice.
    """
    width = max(budget // _STEPS, 1)
    # By what is kept so far, rounded: its bytes, the time, and how it was reached.
    states: dict[int, tuple[float, int, tuple[Any, ...]]] = {0: (0.0, 0, ())}
    if outside[0] > budget:
        return None
    for place, choices in enumerate(options):
        following: dict[int, tuple[float, int, tuple[Any, ...]]] = {}
        for seconds, kept, path in states.values():
            for option in choices:
                total = kept + option.kept
                if kept + option.inside > budget or total + outside[place + 1] > budget:
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
    """The most that is held with these options of the blocks."""
    kept, most = 0, outside[0]
    for place, option in enumerate(chosen):
        most = max(most, kept + option.inside)
        kept += option.kept
        most = max(most, kept + outside[place + 1])
    return most


def _undominated(states: dict[int, tuple[float, int, Any]]) -> dict[int, tuple[float, int, Any]]:
    """The states that none is both smaller and faster than."""
    found, fastest = {}, math.inf
    for key in sorted(states):
        if states[key][0] < fastest:
            found[key], fastest = states[key], states[key][0]
    return found
